"""Defects of policies, tags, rotation's care and the look for room."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLANNING = "tests/unit/vault/test_planning.py tests/property/test_retention.py"
ROTATE = "tests/unit/vault/test_rotate.py"
TAGS = "tests/unit/vault/test_tags.py"
SWEEP = "tests/crash/test_keeping_sweep.py -k one_that_ran_through or anywhere"
ROOM = "tests/gang/test_room_for_a_save.py"
PRUNE = "tests/cli/test_keeping.py"
TRASH = "tests/unit/vault/test_trash.py"
TRASH_SWEEP = "tests/crash/test_trash_sweep.py"
FAILED = "tests/unit/test_failed_saves.py"

MUTANTS = [
    Mutant(
        "a direction without a count is refused",
        "resilient/vault/registry/retention.py",
        'if count in ("min", "max") and not way:',
        'if count in ("min",) and not way:',
        "tests/unit/vault/test_planning.py -k found_by_name_and_direction",
    ),
    Mutant(
        "weeks are counted by the year that a day is in",
        "resilient/vault/registry/planning.py",
        '"%G-W%V"',
        '"%Y-W%V"',
        f"{PLANNING} -k weeks_months",
    ),
    Mutant(
        "within is counted from the newest of all, also one that was left",
        "resilient/vault/registry/planning.py",
        "(moments[one] for one in known.line if one in moments)",
        "iter(sorted(moments.values(), reverse=True))",
        f"{PLANNING} -k within",
    ),
    Mutant(
        "a policy of weeks reads no manifest",
        "resilient/vault/registry/retention.py",
        "return bool(self.keep_best or self.keep_within or calendar)",
        "return bool(self.keep_best or self.keep_daily)",
        f"{PRUNE} -k weeks",
    ),
    Mutant(
        "what killed saves left stays for ever where nothing is let go",
        "resilient/vault/rotation/rotate.py",
        "if retention.is_empty and not sweeps:",
        "if retention.is_empty:",
        "tests/unit/vault/test_rotate.py -k without_a_policy",
    ),
    Mutant(
        "keep_last=0 is accepted",
        "resilient/vault/registry/retention.py",
        "isinstance(value, bool) or value < 1:",
        "isinstance(value, bool) or value < 0:",
        PLANNING,
    ),
    Mutant(
        "a limit of 0 in the arguments means no limit",
        "resilient/vault/registry/retention.py",
        "    if keep_last is not None:\n        given",
        "    if keep_last:\n        given",
        PLANNING,
    ),
    Mutant(
        "the newest is kept only if a policy says so",
        "resilient/vault/registry/planning.py",
        'yield from ((one, "the newest") for one in known.everything[:1])',
        "pass",
        PLANNING,
    ),
    Mutant(
        "an abandoned checkpoint takes the place of a best one of the line",
        "resilient/vault/registry/planning.py",
        "    for group in (known.line, known.abandoned):\n        values = {",
        "    for group in (known.everything,):\n        values = {",
        PLANNING,
    ),
    Mutant(
        "a damaged best keeps its place",
        "resilient/vault/registry/planning.py",
        "if not known.contents[one].problem]",
        "]",
        PLANNING,
    ),
    Mutant(
        "a damaged best is not told",
        "resilient/vault/registry/planning.py",
        "            if problem and whole < wanted.count:",
        "            if False:",
        PLANNING,
    ),
    Mutant(
        "the worst are kept as best",
        "resilient/vault/registry/planning.py",
        "sign = -1 if wanted.rises else 1",
        "sign = 1 if wanted.rises else -1",
        PLANNING,
    ),
    Mutant(
        "the oldest of an hour is kept",
        "resilient/vault/registry/planning.py",
        "key=lambda one: (moments[one], one), reverse=True)",
        "key=lambda one: (moments[one], one))",
        PLANNING,
    ),
    Mutant(
        "hours are those of the writer's zone",
        "resilient/vault/registry/planning.py",
        "return datetime.fromisoformat(moment).astimezone(UTC)",
        "return datetime.fromisoformat(moment)",
        PLANNING,
    ),
    Mutant(
        "the newest goes first",
        "resilient/vault/registry/planning.py",
        "for one in reversed(everything) if one not in reasons)",
        "for one in everything if one not in reasons)",
        PLANNING,
    ),
    Mutant(
        "what has a tag is rotated away",
        "resilient/vault/rotation/rotate.py",
        "pinned=_joined(pins, own, left), held=held",
        "pinned=_joined(own, left), held=held",
        SWEEP,
    ),
    Mutant(
        "a tag that cannot be read protects nothing",
        "resilient/vault/rotation/rotate.py",
        "    held = trouble or unsure or",
        "    held = unsure or",
        ROTATE,
    ),
    Mutant(
        "what a life has just begun from goes",
        "resilient/vault/rotation/rotate.py",
        "pinned=_joined(pins, own, left), held=held",
        "pinned=_joined(pins, left), held=held",
        ROTATE,
    ),
    Mutant(
        "checkpoints go while the newest is damaged",
        "resilient/vault/rotation/rotate.py",
        "unsure or desk.doubt_newest(known)",
        "unsure",
        ROTATE,
    ),
    Mutant(
        "a commit of another process is trusted as well",
        "resilient/vault/rotation/rotate.py",
        'if level == "written" and newest == self.written:',
        'if level == "written":',
        ROTATE,
    ),
    Mutant(
        "the best is not read in full although that is wanted",
        "resilient/vault/rotation/rotate.py",
        "    known = desk.prove_best(known)\n",
        "",
        ROTATE,
    ),
    Mutant(
        "rotation does not look at tags again",
        "resilient/vault/rotation/rotate.py",
        "        if list_tags(store) != found.tags:",
        "        if False:",
        ROTATE,
    ),
    Mutant(
        "leftovers of a crashed rotation stay",
        "resilient/vault/rotation/found.py",
        "or (newest and one < newest and MANIFEST not in names and one not in self.trash)",
        "",
        SWEEP,
    ),
    Mutant(
        "a tag replaces another of its name",
        "resilient/vault/registry/tags.py",
        "        create_record(store, tag_key(name), seal(tag.to_json()))",
        "        store.put(tag_key(name), seal(tag.to_json()))",
        TAGS,
    ),
    Mutant(
        "a tag of a checkpoint that went meanwhile stays",
        "resilient/vault/registry/tags.py",
        "        store.delete(tag_key(name))\n        raise",
        "        raise",
        TAGS,
    ),
    Mutant(
        "what rotates away under a reader is called damaged",
        "resilient/vault/access/damage.py",
        "        store.stat(manifest.checkpoint.manifest_key)\n",
        "",
        "tests/unit/vault/test_field_bugs_rotation.py",
    ),
    Mutant(
        "each rank looks only for room for itself",
        "resilient/vault/saving/space.py",
        'sum(one["needs"] for one in here)',
        'max(one["needs"] for one in here)',
        ROOM,
    ),
    Mutant(
        "room is looked for after writing",
        "resilient/vault/saving/persist.py",
        "        require_space(desk, checkpoint, division, job.topic)\n",
        "        mine = attempt(lambda: _write(desk, job, division, pace))\n"
        "        require_space(desk, checkpoint, division, job.topic)\n",
        ROOM,
    ),
    Mutant(
        "another start is rotated away",
        "resilient/vault/rotation/rotate.py",
        "Known(descent.candidates, descent.abandoned, keep=keep, separate=descent.separate)",
        "Known(descent.candidates, (*descent.abandoned, *descent.separate), keep=keep)",
        ROTATE,
    ),
    Mutant(
        "prune does not ask",
        "cli/resilient_cli/commands/keeping.py",
        "    asks = not (dry_run or yes)",
        "    asks = False",
        PRUNE,
    ),
    Mutant(
        "a dry run deletes",
        "cli/resilient_cli/commands/keeping.py",
        "    if not dry_run:\n        with Waiting",
        "    if True:\n        with Waiting",
        PRUNE,
    ),
    Mutant(
        "a mark that could not be put is taken for put",
        "resilient/vault/saving/tidy.py",
        "    is_marked = not is_first\n",
        "    is_marked = True\n",
        FAILED,
    ),
    Mutant(
        "a mark is owed and forgotten",
        "resilient/vault/saving/persist.py",
        "job.is_first or memory.owes_mark",
        "job.is_first",
        FAILED,
    ),
    Mutant(
        "a manifest is deleted before it is in the trash",
        "resilient/vault/rotation/rotate.py",
        "            put_in_trash(store, checkpoint, found.into)\n",
        "            kept = store.get(checkpoint.manifest_key)\n"
        "            store.delete(checkpoint.manifest_key)\n"
        "            store.put(checkpoint.key(found.into), kept)\n",
        f"{TRASH_SWEEP} -k anywhere",
    ),
    Mutant(
        "a rotation frees what is in the trash before its time is over",
        "resilient/vault/rotation/found.py",
        " and one not in self.trash)",
        ")",
        f"{TRASH} -k not_before",
    ),
    Mutant(
        "a rotation does not ask what those in the trash refer to",
        "resilient/vault/rotation/rotate.py",
        "[*staying, *held]",
        "staying",
        f"{TRASH} -k refer_to",
    ),
    Mutant(
        "a rotation deletes files of what was brought back meanwhile",
        "resilient/vault/rotation/rotate.py",
        "    if back:\n",
        "    if False:\n",
        f"{TRASH_SWEEP} -k while_it_is_freed",
    ),
    Mutant(
        "what is brought back is not looked for in the trash again",
        "resilient/vault/rotation/trash.py",
        "    if not _is_there(store, where):\n",
        "    if False:\n",
        f"{TRASH_SWEEP} -k while_it_is_freed",
    ),
    Mutant(
        "what lost a file comes back from the trash",
        "resilient/vault/rotation/trash.py",
        "        if absent:\n",
        "        if False:\n",
        f"{TRASH} -k not_all_there",
    ),
    Mutant(
        "what is in the trash is told as passed over",
        "resilient/vault/registry/catalog.py",
        "        if MANIFEST not in newer[one] and one not in trash\n",
        "        if MANIFEST not in newer[one]\n",
        f"{TRASH} -k lost_manifest",
    ),
    Mutant(
        "undo brings back all of the trash",
        "resilient/vault/rotation/trash.py",
        "if mark.since == newest)",
        "if newest)",
        f"{TRASH} -k by_itself",
    ),
    Mutant(
        "a near tier takes back what was pruned there",
        "resilient/vault/tiers/tiers.py",
        " - whole - trash_of(folders).keys()",
        " - whole",
        f"{TRASH} -k near_tier",
    ),
]
