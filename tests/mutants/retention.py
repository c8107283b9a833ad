"""Defects of policies, tags, rotation's care and the look for room."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNING = "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py"
ROTATE = "tests/unit/checkpoint/test_rotate.py"
TAGS = "tests/unit/checkpoint/test_tags.py"
SWEEP = "tests/crash/test_keeping_sweep.py -k one_that_ran_through or anywhere"
ROOM = "tests/gang/test_room_for_a_save.py"
PRUNE = "tests/cli/test_keeping.py"
TRASH = "tests/unit/checkpoint/test_trash.py"
TRASH_SWEEP = "tests/crash/test_trash_sweep.py"
FAILED = "tests/unit/test_failed_saves.py"

MUTANTS = [
    Mutant(
        "a direction without a count is refused",
        "resilient/checkpoint/retention.py",
        'if count in ("min", "max") and not way:',
        'if count in ("min",) and not way:',
        "tests/unit/checkpoint/test_planning.py -k found_by_name_and_direction",
    ),
    Mutant(
        "weeks are counted by the year that a day is in",
        "resilient/checkpoint/retention.py",
        '"%G-W%V"',
        '"%Y-W%V"',
        f"{PLANNING} -k weeks_months",
    ),
    Mutant(
        "within is counted from the newest of all, also one that was left",
        "resilient/checkpoint/retention.py",
        "(moments[checkpoint] for checkpoint in known.line if checkpoint in moments)",
        "iter(sorted(moments.values(), reverse=True))",
        f"{PLANNING} -k within",
    ),
    Mutant(
        "a policy of weeks reads no manifest",
        "resilient/checkpoint/retention.py",
        "return bool(self.keep_best or self.keep_within or calendar)",
        "return bool(self.keep_best or self.keep_daily)",
        f"{PRUNE} -k weeks",
    ),
    Mutant(
        "what killed saves left stays for ever where nothing is let go",
        "resilient/checkpoint/garbage_collection.py",
        "if retention.is_empty and not sweeps:",
        "if retention.is_empty:",
        "tests/unit/checkpoint/test_rotate.py -k without_a_policy",
    ),
    Mutant(
        "keep_last=0 is accepted",
        "resilient/checkpoint/retention.py",
        "isinstance(value, bool) or value < 1:",
        "isinstance(value, bool) or value < 0:",
        PLANNING,
    ),
    Mutant(
        "a limit of 0 in the arguments means no limit",
        "resilient/checkpoint/retention.py",
        "    if keep_last is not None:\n        given",
        "    if keep_last:\n        given",
        PLANNING,
    ),
    Mutant(
        "the newest is kept only if a policy says so",
        "resilient/checkpoint/retention.py",
        'yield from ((checkpoint, "the newest") for checkpoint in known.everything[:1])',
        "pass",
        PLANNING,
    ),
    Mutant(
        "an abandoned checkpoint takes the place of a best one of the line",
        "resilient/checkpoint/retention.py",
        "    for group in (known.line, known.abandoned):\n        values = {",
        "    for group in (known.everything,):\n        values = {",
        PLANNING,
    ),
    Mutant(
        "a damaged best keeps its place",
        "resilient/checkpoint/retention.py",
        ("if not known.contents[checkpoint].problem\n    ]"),
        "]",
        PLANNING,
    ),
    Mutant(
        "a damaged best is not told",
        "resilient/checkpoint/retention.py",
        "            if problem and whole < wanted.count:",
        "            if False:",
        PLANNING,
    ),
    Mutant(
        "the worst are kept as best",
        "resilient/checkpoint/retention.py",
        "sign = -1 if wanted.rises else 1",
        "sign = 1 if wanted.rises else -1",
        PLANNING,
    ),
    Mutant(
        "the oldest of an hour is kept",
        "resilient/checkpoint/retention.py",
        ("key=lambda checkpoint: (moments[checkpoint], checkpoint), reverse=True\n        )"),
        "key=lambda checkpoint: (moments[checkpoint], checkpoint))",
        PLANNING,
    ),
    Mutant(
        "hours are those of the writer's zone",
        "resilient/checkpoint/retention.py",
        "return datetime.fromisoformat(moment).astimezone(UTC)",
        "return datetime.fromisoformat(moment)",
        PLANNING,
    ),
    Mutant(
        "the newest goes first",
        "resilient/checkpoint/retention.py",
        ("for checkpoint in reversed(everything) if checkpoint not in reasons\n        )"),
        "for checkpoint in everything if checkpoint not in reasons)",
        PLANNING,
    ),
    Mutant(
        "what has a tag is rotated away",
        "resilient/checkpoint/garbage_collection.py",
        "pinned=_joined(pins, own, left), held=reason",
        "pinned=_joined(own, left), reason=reason",
        SWEEP,
    ),
    Mutant(
        "a tag that cannot be read protects nothing",
        "resilient/checkpoint/garbage_collection.py",
        "    reason = trouble or unsure or",
        "    reason = unsure or",
        ROTATE,
    ),
    Mutant(
        "what a life has just begun from goes",
        "resilient/checkpoint/garbage_collection.py",
        "pinned=_joined(pins, own, left), held=reason",
        "pinned=_joined(pins, left), reason=reason",
        ROTATE,
    ),
    Mutant(
        "checkpoints go while the newest is damaged",
        "resilient/checkpoint/garbage_collection.py",
        "unsure or evidence.doubt_newest(known)",
        "unsure",
        ROTATE,
    ),
    Mutant(
        "a commit of another process is trusted as well",
        "resilient/checkpoint/garbage_collection.py",
        'if level == "written" and newest == self.written:',
        'if level == "written":',
        ROTATE,
    ),
    Mutant(
        "the best is not read in full although that is wanted",
        "resilient/checkpoint/garbage_collection.py",
        "    known = evidence.prove_best(known)\n",
        "",
        ROTATE,
    ),
    Mutant(
        "rotation does not look at tags again",
        "resilient/checkpoint/garbage_collection.py",
        "        if list_tags(store) != found.tags:",
        "        if False:",
        ROTATE,
    ),
    Mutant(
        "leftovers of a crashed rotation stay",
        "resilient/checkpoint/repository_scan.py",
        (
            "or (\n"
            "                newest\n"
            "                and checkpoint < newest\n"
            "                and MANIFEST not in names\n"
            "                and checkpoint not in self.trash\n"
            "            )"
        ),
        "",
        SWEEP,
    ),
    Mutant(
        "a tag replaces another of its name",
        "resilient/checkpoint/refs.py",
        "        create_record(store, tag_key(name), seal(tag.to_json()))",
        "        store.put(tag_key(name), seal(tag.to_json()))",
        TAGS,
    ),
    Mutant(
        "a tag of a checkpoint that went meanwhile stays",
        "resilient/checkpoint/refs.py",
        "        store.delete(tag_key(name))\n        raise",
        "        raise",
        TAGS,
    ),
    Mutant(
        "what rotates away under a reader is called damaged",
        "resilient/checkpoint/verified_read.py",
        "        store.stat(manifest.checkpoint.manifest_key)\n",
        "",
        "tests/unit/checkpoint/test_field_bugs_rotation.py",
    ),
    Mutant(
        "each rank looks only for room for itself",
        "resilient/checkpoint/save/persist.py",
        'sum(report["needs"] for report in here)',
        'max(report["needs"] for report in here)',
        ROOM,
    ),
    Mutant(
        "room is looked for after writing",
        "resilient/checkpoint/save/persist.py",
        "        require_space(context, checkpoint, division, job.topic)\n",
        (
            "        mine = capture_failure(lambda: _write(context, job, division, pace))\n"
            "        require_space(context, checkpoint, division, job.topic)\n"
        ),
        ROOM,
    ),
    Mutant(
        "another start is rotated away",
        "resilient/checkpoint/garbage_collection.py",
        (
            "RetentionInput(\n"
            "        descent.candidates, descent.abandoned, keep=keep, separate=descent.separate\n"
            "    )"
        ),
        ("RetentionInput(descent.candidates, (*descent.abandoned, *descent.separate), keep=keep)"),
        ROTATE,
    ),
    Mutant(
        "prune does not ask",
        "cli/resilient_cli/commands/prune.py",
        "    asks = not (dry_run or output.agrees)",
        "    asks = False",
        PRUNE,
    ),
    Mutant(
        "a dry run deletes",
        "cli/resilient_cli/commands/prune.py",
        "    if not dry_run:\n        with Waiting",
        "    if True:\n        with Waiting",
        PRUNE,
    ),
    Mutant(
        "a mark that could not be put is taken for put",
        "resilient/checkpoint/save/persist.py",
        "    is_marked = not is_first\n",
        "    is_marked = True\n",
        FAILED,
    ),
    Mutant(
        "a mark is owed and forgotten",
        "resilient/checkpoint/save/persist.py",
        "job.is_first or memory.owes_mark",
        "job.is_first",
        FAILED,
    ),
    Mutant(
        "a manifest is deleted before it is in the trash",
        "resilient/checkpoint/garbage_collection.py",
        "            put_in_trash(store, checkpoint, found.into)\n",
        "            kept = store.get(checkpoint.manifest_key)\n"
        "            store.delete(checkpoint.manifest_key)\n"
        "            store.put(checkpoint.key(found.into), kept)\n",
        f"{TRASH_SWEEP} -k anywhere",
    ),
    Mutant(
        "a rotation frees what is in the trash before its time is over",
        "resilient/checkpoint/repository_scan.py",
        (" and checkpoint not in self.trash\n            )"),
        ")",
        f"{TRASH} -k not_before",
    ),
    Mutant(
        "a rotation does not ask what those in the trash refer to",
        "resilient/checkpoint/garbage_collection.py",
        "[*staying, *in_trash]",
        "staying",
        f"{TRASH} -k refer_to",
    ),
    Mutant(
        "a rotation deletes files of what was brought back meanwhile",
        "resilient/checkpoint/garbage_collection.py",
        "    if back:\n",
        "    if False:\n",
        f"{TRASH_SWEEP} -k while_it_is_freed",
    ),
    Mutant(
        "an undo whose answer was lost brings back another prune when it is given again",
        "resilient/checkpoint/trash.py",
        "        if not _is_there(store, key):\n            raise\n",
        "        raise\n",
        f"{TRASH} -k given_again",
    ),
    Mutant(
        "an undo that lost one answer of a question fails, and is given again",
        "resilient/checkpoint/trash.py",
        "        with suppress(StoreUnavailable):\n            return _is_stored(store, key)\n",
        "",
        f"{TRASH} -k given_again",
    ),
    Mutant(
        "an undo fails because a mark beside a manifest stays",
        "resilient/checkpoint/trash.py",
        "    with suppress(StoreError):\n        for name",
        "    with suppress(KeyExists):\n        for name",
        f"{TRASH} -k last_operation",
    ),
    Mutant(
        "what is brought back is not looked for in the trash again",
        "resilient/checkpoint/trash.py",
        "    if not _is_there(store, where):\n",
        "    if False:\n",
        f"{TRASH_SWEEP} -k while_it_is_freed",
    ),
    Mutant(
        "what lost a file comes back from the trash",
        "resilient/checkpoint/trash.py",
        "        if absent:\n",
        "        if False:\n",
        f"{TRASH} -k not_all_there",
    ),
    Mutant(
        "what is in the trash is told as passed over",
        "resilient/checkpoint/catalog.py",
        "        if MANIFEST not in newer[checkpoint] and checkpoint not in trash\n",
        "        if MANIFEST not in newer[checkpoint]\n",
        f"{TRASH} -k lost_manifest",
    ),
    Mutant(
        "undo brings back all of the trash",
        "resilient/checkpoint/trash.py",
        "if mark.prune == prune), reverse",
        "if prune), reverse",
        f"{TRASH} -k by_itself",
    ),
    Mutant(
        "an undo that is given twice takes an older prune back",
        "resilient/checkpoint/trash.py",
        "    prune = prune or prunes_in(trash)[0]\n",
        "    prune = prunes_in(trash)[0]\n",
        f"{TRASH} -k given_twice",
    ),
    Mutant(
        "a near tier takes back what was pruned there",
        "resilient/checkpoint/tiers/tiered_store.py",
        " - whole - trash_of(folders).keys()",
        " - whole",
        f"{TRASH} -k near_tier",
    ),
]
