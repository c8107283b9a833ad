"""Defects of retention, tags, prune and the trash."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "retention deletes the files before the manifest",
        "resilient/checkpoint/garbage_collection.py",
        "        store.delete(checkpoint.manifest_key)\n",
        (
            "        for entry in sorted(store.list(checkpoint.folder + '/'), reverse=True):\n"
            "            store.delete(entry.key)\n"
        ),
        "tests/crash/test_sweep.py -k one_crash",
    ),
    Mutant(
        "keep_last keeps one checkpoint too few",
        "resilient/checkpoint/retention.py",
        "if checkpoint not in last_checkpoints and len(last_checkpoints) >= retention.keep_last:",
        "if checkpoint not in last_checkpoints and len(last_checkpoints) >= max(retention.keep_last - 1, 1):",
        "tests/crash/test_sweep.py -k one_crash",
    ),
    Mutant(
        "retention deletes the folder of a save in flight",
        "resilient/checkpoint/repository_scan.py",
        (
            "(\n"
            "                newest\n"
            "                and checkpoint < newest\n"
            "                and MANIFEST not in names\n"
            "                and"
        ),
        "(newest and MANIFEST not in names and",
        "tests/unit/checkpoint",
        promise="Crash sweep",
    ),
    Mutant(
        "a stale attempt runs retention",
        "resilient/checkpoint/garbage_collection.py",
        "        fence.check()\n        if list_tags",
        "        if list_tags",
        "tests/unit/checkpoint",
        promise="P7",
    ),
    Mutant(
        "a failed save deletes a committed checkpoint",
        "resilient/checkpoint/garbage_collection.py",
        "        store.stat(checkpoint.manifest_key)\n        return\n",
        "        pass\n",
        "tests/unit/test_checkpointer.py",
    ),
    Mutant(
        "retention checks only the generation number",
        "resilient/checkpoint/garbage_collection.py",
        "    plan = apply_plan(store, scan, generation, token)\n",
        "    plan = apply_plan(store, scan, generation)\n",
        "tests/unit/checkpoint/test_fence_token.py -k rotation",
    ),
    Mutant(
        "a failed save deletes the files of another claim",
        "resilient/checkpoint/garbage_collection.py",
        "    if token:\n        check_fence(store, checkpoint.generation, token)\n",
        "",
        "tests/unit/checkpoint/test_fence_token.py -k discard",
    ),
    Mutant(
        "keep_weekly counts weeks by calendar year",
        "resilient/checkpoint/retention.py",
        '"%G-W%V"',
        '"%Y-W%V"',
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py -k weeks_months",
        promise="Retention",
    ),
    Mutant(
        "keep_within counts from the newest checkpoint, abandoned ones included",
        "resilient/checkpoint/retention.py",
        "(moments[checkpoint] for checkpoint in state.line if checkpoint in moments)",
        "iter(sorted(moments.values(), reverse=True))",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py -k within",
        promise="Retention",
    ),
    Mutant(
        "keep_weekly does not read the manifests",
        "resilient/checkpoint/retention.py",
        "return bool(self.keep_best or self.keep_within or calendar)",
        "return bool(self.keep_best or self.keep_daily)",
        "tests/cli/test_keeping.py -k weeks",
        promise="Retention",
    ),
    Mutant(
        "without a policy, files of killed saves are never deleted",
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
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Field bugs",
    ),
    Mutant(
        "save_total_limit=0 means no limit",
        "resilient/checkpoint/retention.py",
        ("    if keep_last is not None:\n        policies"),
        ("    if keep_last:\n        policies"),
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Field bugs",
    ),
    Mutant(
        "the newest checkpoint stays only if a policy keeps it",
        "resilient/checkpoint/retention.py",
        'yield from ((checkpoint, "the newest") for checkpoint in state.everything[:1])',
        "pass",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "an abandoned checkpoint takes the place of a best one",
        "resilient/checkpoint/retention.py",
        ("    for group in (state.line, state.abandoned):\n        values = {"),
        ("    for group in (state.everything,):\n        values = {"),
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "a damaged best checkpoint keeps its place",
        "resilient/checkpoint/retention.py",
        ("if not state.contents[checkpoint].problem\n    ]"),
        "]",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "a damaged best checkpoint is not reported",
        "resilient/checkpoint/retention.py",
        "            if problem and intact_count < policy.count:",
        "            if False:",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "keep_best keeps the worst checkpoints",
        "resilient/checkpoint/retention.py",
        "sign = -1 if policy.rises else 1",
        "sign = 1 if policy.rises else -1",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "keep_hourly keeps the oldest checkpoint of an hour",
        "resilient/checkpoint/retention.py",
        "key=lambda checkpoint: (moments[checkpoint], checkpoint), reverse=True\n        )",
        "key=lambda checkpoint: (moments[checkpoint], checkpoint))",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "calendar periods use the writer's time zone",
        "resilient/checkpoint/retention.py",
        "return datetime.fromisoformat(moment).astimezone(UTC)",
        "return datetime.fromisoformat(moment)",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "retention deletes the newest checkpoint first",
        "resilient/checkpoint/retention.py",
        ("for checkpoint in reversed(all_checkpoints) if checkpoint not in reasons\n        )"),
        "for checkpoint in all_checkpoints if checkpoint not in reasons)",
        "tests/unit/checkpoint/test_planning.py tests/property/test_retention.py",
        promise="Retention",
    ),
    Mutant(
        "retention deletes a tagged checkpoint",
        "resilient/checkpoint/garbage_collection.py",
        "pinned=_merged(pins, parent_pins, undo_pins), held=reason",
        "pinned=_merged(parent_pins, undo_pins), reason=reason",
        "tests/crash/test_keeping_sweep.py -k one_that_ran_through or anywhere",
    ),
    Mutant(
        "an unreadable tag protects nothing",
        "resilient/checkpoint/garbage_collection.py",
        "    reason = pins_problem or parent_problem or",
        "    reason = parent_problem or",
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        "retention deletes the checkpoint that the attempt resumed from",
        "resilient/checkpoint/garbage_collection.py",
        "pinned=_merged(pins, parent_pins, undo_pins), held=reason",
        "pinned=_merged(pins, undo_pins), reason=reason",
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        "retention deletes although the newest checkpoint is damaged",
        "resilient/checkpoint/garbage_collection.py",
        "parent_problem or evidence.doubt_newest(state)",
        "parent_problem",
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        "retention trusts a commit of another process",
        "resilient/checkpoint/garbage_collection.py",
        'if level == "written" and newest == self.written:',
        'if level == "written":',
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        'verify_before_rotate="full" does not read the best checkpoint',
        "resilient/checkpoint/garbage_collection.py",
        "    state = evidence.verify_best(state)\n",
        "",
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        "retention does not check the tags again before a delete",
        "resilient/checkpoint/garbage_collection.py",
        "        if list_tags(store) != scan.tags:",
        "        if False:",
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        "files of an interrupted retention stay",
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
        "tests/crash/test_keeping_sweep.py -k one_that_ran_through or anywhere",
    ),
    Mutant(
        "a tag replaces another tag of the same name",
        "resilient/checkpoint/refs.py",
        "        create_record(store, tag_key(name), seal(tag.to_json()))",
        "        store.put(tag_key(name), seal(tag.to_json()))",
        "tests/unit/checkpoint/test_tags.py",
        promise="Retention",
    ),
    Mutant(
        "a tag of a checkpoint deleted in the meantime stays",
        "resilient/checkpoint/refs.py",
        "        store.delete(tag_key(name))\n        raise",
        "        raise",
        "tests/unit/checkpoint/test_tags.py",
        promise="Retention",
    ),
    Mutant(
        "retention deletes checkpoints of a separate start",
        "resilient/checkpoint/garbage_collection.py",
        (
            "RetentionInput(\n"
            "        descent.candidates, descent.abandoned, keep=keep, separate=descent.separate\n"
            "    )"
        ),
        "RetentionInput(descent.candidates, (*descent.abandoned, *descent.separate), keep=keep)",
        "tests/unit/checkpoint/test_rotate.py",
    ),
    Mutant(
        "a manifest is deleted before its copy is in the trash",
        "resilient/checkpoint/garbage_collection.py",
        "            put_in_trash(store, checkpoint, scan.into)\n",
        (
            "            kept = store.get(checkpoint.manifest_key)\n"
            "            store.delete(checkpoint.manifest_key)\n"
            "            store.put(checkpoint.key(scan.into), kept)\n"
        ),
        "tests/crash/test_trash_sweep.py -k anywhere",
    ),
    Mutant(
        "retention empties the trash before the grace period ends",
        "resilient/checkpoint/repository_scan.py",
        " and checkpoint not in self.trash\n            )",
        ")",
        "tests/unit/checkpoint/test_trash.py -k not_before",
    ),
    Mutant(
        "retention ignores files that checkpoints in the trash refer to",
        "resilient/checkpoint/garbage_collection.py",
        "[*staying, *in_trash]",
        "staying",
        "tests/unit/checkpoint/test_trash.py -k refer_to",
    ),
    Mutant(
        "retention deletes files of a checkpoint restored in the meantime",
        "resilient/checkpoint/garbage_collection.py",
        "    if restored_checkpoint:\n",
        "    if False:\n",
        "tests/crash/test_trash_sweep.py -k while_it_is_freed",
    ),
    Mutant(
        "a repeated undo restores another prune after a lost answer",
        "resilient/checkpoint/trash.py",
        "        if not _is_there(store, key):\n            raise\n",
        "        raise\n",
        "tests/unit/checkpoint/test_trash.py -k given_again",
    ),
    Mutant(
        "an undo fails after one lost answer to a lookup",
        "resilient/checkpoint/trash.py",
        ("        with suppress(StoreUnavailable):\n            return _is_stored(store, key)\n"),
        "",
        "tests/unit/checkpoint/test_trash.py -k given_again",
    ),
    Mutant(
        "an undo fails because the mark beside a manifest stays",
        "resilient/checkpoint/trash.py",
        "    with suppress(StoreError):\n        for name",
        "    with suppress(KeyExists):\n        for name",
        "tests/unit/checkpoint/test_trash.py -k last_operation",
    ),
    Mutant(
        "a restored checkpoint is not looked for in the trash again",
        "resilient/checkpoint/trash.py",
        "    if not _is_there(store, trash_key):\n",
        "    if False:\n",
        "tests/crash/test_trash_sweep.py -k while_it_is_freed",
    ),
    Mutant(
        "a checkpoint with a missing file is restored from the trash",
        "resilient/checkpoint/trash.py",
        "        if problem:\n",
        "        if False:\n",
        "tests/unit/checkpoint/test_trash.py -k not_all_there",
    ),
    Mutant(
        "an undo restores everything in the trash",
        "resilient/checkpoint/trash.py",
        "if mark.prune == prune), reverse",
        "if prune), reverse",
        "tests/unit/checkpoint/test_trash.py -k by_itself",
    ),
    Mutant(
        "a repeated undo restores an older prune",
        "resilient/checkpoint/trash.py",
        "    prune = prune or prunes_in(trash)[0]\n",
        "    prune = prunes_in(trash)[0]\n",
        "tests/unit/checkpoint/test_trash.py -k given_twice",
    ),
    Mutant(
        "a daemon that continues late runs retention with an old list",
        "resilient/checkpoint/garbage_collection.py",
        "    if written is not None and _has_newer_commit(written, scan.folders):",
        "    if written is None:",
        "tests/crash/test_sleeping_keeper.py",
    ),
    Mutant(
        "retention deletes files that other checkpoints refer to",
        "resilient/checkpoint/repository_scan.py",
        (
            "for checkpoint, name in self.stale()\n"
            "            if not self.needed.holds(checkpoint, name)\n"
            "        ]"
        ),
        "for checkpoint, name in self.stale()]",
        "tests/crash/test_keeping_sweep.py -k anywhere",
    ),
    Mutant(
        "retention deletes files that other checkpoints refer to (random histories)",
        "resilient/checkpoint/repository_scan.py",
        (
            "for checkpoint, name in self.stale()\n"
            "            if not self.needed.holds(checkpoint, name)\n"
            "        ]"
        ),
        "for checkpoint, name in self.stale()]",
        "tests/property/test_vault_machine.py",
        promise="Deduplication",
    ),
    Mutant(
        "checkpoints of the first attempt protect no shared files",
        "resilient/checkpoint/garbage_collection.py",
        (
            "if MANIFEST in names\n"
            "        and (scan.into or checkpoint not in scan.plan.doomed)\n"
            "        and checkpoint > oldest"
        ),
        "if checkpoint.generation > 1 and (scan.into or checkpoint not in scan.plan.doomed) and checkpoint > oldest",
        "tests/unit/checkpoint/test_rotate_references.py",
    ),
    Mutant(
        "an unreadable manifest protects no files",
        "resilient/checkpoint/repository_scan.py",
        "        if self.unknown is not None and checkpoint < self.unknown:",
        "        if False:",
        "tests/unit/checkpoint/test_rotate_references.py",
    ),
    Mutant(
        "files are deleted although the tags stopped retention",
        "resilient/checkpoint/garbage_collection.py",
        "            return replace(plan, doomed=plan.doomed[:deleted_count],",
        "            break\n            plan = replace(plan, doomed=plan.doomed[:deleted_count],",
        "tests/unit/checkpoint/test_rotate_references.py",
    ),
    Mutant(
        "retention does not check the fence before it deletes files",
        "resilient/checkpoint/garbage_collection.py",
        "        fence.check()\n        for _, name",
        "        for _, name",
        "tests/unit/checkpoint/test_rotate_references.py",
    ),
    Mutant(
        "retention checks the fence before the first folder only",
        "resilient/checkpoint/garbage_collection.py",
        "    for checkpoint, names in groupby(files, itemgetter(0)):\n        fence.check()\n",
        (
            "    if files:\n        fence.check()\n"
            "    for checkpoint, names in groupby(files, itemgetter(0)):\n"
        ),
        "tests/unit/checkpoint/test_fence_token.py -k one_folder",
    ),
    Mutant(
        "retention deletes on an old fence check",
        "resilient/checkpoint/garbage_collection.py",
        "            fence.check_if_old()\n",
        "",
        "tests/unit/checkpoint/test_fence_token.py -k long_sleep",
    ),
    Mutant(
        "the trash is emptied after one fence check",
        "resilient/checkpoint/trash.py",
        "            fence()\n            store.delete",
        "            store.delete",
        "tests/unit/checkpoint/test_fence_token.py -k trash",
    ),
    Mutant(
        "retention deletes shared files before the manifests",
        "resilient/checkpoint/garbage_collection.py",
        "    for deleted_count, checkpoint in enumerate(plan.doomed):\n",
        (
            "    for checkpoint, name in scan.unneeded():\n"
            "        store.delete(checkpoint.key(name))\n"
            "    for deleted_count, checkpoint in enumerate(plan.doomed):\n"
        ),
        "tests/crash/test_keeping_sweep.py -k anywhere",
    ),
    Mutant(
        "lost parity stops retention",
        "resilient/checkpoint/repository_scan.py",
        "        if file.name not in needed_names:\n            continue\n",
        "",
        "tests/unit/checkpoint/test_repair.py tests/unit/checkpoint/test_repair_from_copies.py",
    ),
    Mutant(
        "ckpt prune relies on files that are not synced",
        "resilient/checkpoint/garbage_collection.py",
        "    fsync_leftovers(store)\n",
        "",
        "tests/crash/test_settling.py",
    ),
    Mutant(
        "retention deletes a save that other ranks have started",
        "resilient/checkpoint/repository_scan.py",
        (
            "(\n"
            "                newest\n"
            "                and checkpoint < newest\n"
            "                and MANIFEST not in names\n"
            "                and"
        ),
        "(newest and checkpoint != newest and MANIFEST not in names and",
        "tests/crash/test_enumeration.py -k recorded_history",
    ),
    Mutant(
        "a time reference selects a later checkpoint",
        "resilient/checkpoint/refs.py",
        "created_at) <= moment:\n",
        "created_at) >= moment:\n",
        "tests/unit/checkpoint/test_going_back.py -k moment_means",
    ),
    Mutant(
        "a hint names --undo without the id of the prune",
        "resilient/checkpoint/refs.py",
        " --undo {shell_quote(mark.prune)}",
        " --undo",
        "tests/cli/test_trash_told.py -k no_later_prune",
        promise="Deletion and rollback",
    ),
]
