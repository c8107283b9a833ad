"""Defects of rollback, undo and copies of checkpoints."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a rollback trains on the bad data again",
        "resilient/train/rollback.py",
        "    cursor.skip_to(*data_position)\n",
        "    run.cursor.skip_to(run.cursor.epoch, run.cursor.samples)\n",
        "tests/unit/train/test_rollback.py -k over_epochs",
    ),
    Mutant(
        "data left out by a rollback is not in the ledger",
        "resilient/train/rollback.py",
        "    run.ledger.leave_out(run.cursor, REASON, until=data_position[:2])\n",
        "",
        "tests/unit/train/test_rollback.py -k stop_that_was_agreed",
    ),
    Mutant(
        "an agreed stop waits for repeated steps",
        "resilient/train/rollback.py",
        "    run.turns_ahead += step - state.global_step\n",
        "",
        "tests/unit/train/test_rollback.py -k stop_that_was_agreed",
    ),
    Mutant(
        "the optimizer steps with NaN gradients",
        "resilient/train/loss_guard.py",
        "        if nonfinite_count:\n",
        "        if False:\n",
        "tests/unit/train/test_rollback.py -k unless_they_are_expected",
    ),
    Mutant(
        "recent losses are forgotten at resume",
        "resilient/train/loss_guard.py",
        '        self._recent.extend(state_dict["recent"])\n',
        "",
        "tests/unit/train/test_rollback.py -k learned_is_saved",
    ),
    Mutant(
        "a rollback claims no generation",
        "resilient/checkpoint/rollback.py",
        "    check_fence(store, generation.number, generation.token)\n",
        "    store.delete(f'generations/g{generation.number:06d}.json')\n",
        "tests/unit/checkpoint/test_going_back.py -k adds_one_record",
    ),
    Mutant(
        "a rollback starts from the newest checkpoint",
        "resilient/checkpoint/rollback.py",
        "        plan.after,\n        cause=",
        "        plan.before,\n        cause=",
        "tests/unit/checkpoint/test_going_back.py -k adds_one_record",
    ),
    Mutant(
        "a rollback accepts a damaged target",
        "resilient/checkpoint/rollback.py",
        "    if damage_findings:\n",
        "    if False:\n",
        "tests/unit/checkpoint/test_going_back.py -k damaged_target",
    ),
    Mutant(
        "a rollback that lost a race reports success",
        "resilient/checkpoint/rollback.py",
        "    check_fence(store, generation.number, generation.token)\n",
        "",
        "tests/unit/checkpoint/test_going_back.py -k two_who_go_back",
    ),
    Mutant(
        "a rollback accepts a target that retention deleted",
        "resilient/checkpoint/rollback.py",
        "        store.stat(plan.after.manifest_key)\n",
        "        pass\n",
        "tests/unit/checkpoint/test_going_back.py -k rotation_takes",
    ),
    Mutant(
        "an undo reverts the previous undo",
        "resilient/checkpoint/reflog.py",
        "                open_moves.pop()\n",
        "                open_moves.append(number)\n",
        "tests/unit/checkpoint/test_going_back.py -k one_after_the_other",
    ),
    Mutant(
        "ckpt undo reverts a rollback of the trainer",
        "resilient/checkpoint/reflog.py",
        'ROLLBACK = "ckpt-rollback"\n',
        'ROLLBACK = "rollback"\n',
        "tests/unit/checkpoint/test_going_back.py -k of_the_trainer_itself",
    ),
    Mutant(
        "an undo returns to the start of the attempt before",
        "resilient/checkpoint/reflog.py",
        "            if own_checkpoints:\n",
        "            if own_checkpoints and self._generations[number].parent:\n",
        "tests/unit/checkpoint/test_going_back.py -k one_after_the_other",
    ),
    Mutant(
        "an undo skips an unreadable record",
        "resilient/checkpoint/reflog.py",
        "            if generation is None:\n                raise IntegrityError(",
        (
            "            if generation is None:\n"
            "                continue\n"
            "            if generation is None:\n"
            "                raise IntegrityError("
        ),
        "tests/unit/checkpoint/test_going_back.py -k does_not_guess",
    ),
    Mutant(
        "retention deletes checkpoints that a user rolled back",
        "resilient/checkpoint/reflog.py",
        "                if generation.cause in BY_HAND:\n",
        "                if False:\n",
        "tests/unit/checkpoint/test_going_back.py -k keeps_what_a_person_left",
    ),
    Mutant(
        "retention keeps checkpoints of a stale process",
        "resilient/checkpoint/reflog.py",
        "                break\n",
        "                pass\n",
        "tests/unit/checkpoint/test_going_back.py -k restart_left_before",
    ),
    Mutant(
        "ckpt prune deletes the target of an undo",
        "resilient/checkpoint/reflog.py",
        '    elif policy == "undo":\n',
        '    elif policy == "never":\n',
        "tests/unit/checkpoint/test_going_back.py -k prune_keeps",
    ),
    Mutant(
        "ckpt cp copies a damaged file",
        "resilient/checkpoint/replicate.py",
        "        if digest_file(data) != entry.proof:\n",
        "        if False:\n",
        "tests/unit/checkpoint/test_mirroring.py -k damage",
    ),
    Mutant(
        "ckpt cp copies into a repository whose run continued",
        "resilient/checkpoint/replicate.py",
        "    if newest > own_generation:\n",
        "    if False:\n",
        "tests/unit/checkpoint/test_mirroring.py -k goes_on",
    ),
    Mutant(
        "ckpt cp mixes two runs",
        "resilient/checkpoint/replicate.py",
        "    if runs:\n",
        "    if False:\n",
        "tests/unit/checkpoint/test_mirroring.py -k another_run",
    ),
    Mutant(
        "ckpt cp copies the manifest before the files",
        "resilient/checkpoint/replicate.py",
        ("    for entry in plan.missing:\n        _copy_file("),
        (
            "    put_manifest(target, manifest.checkpoint.manifest_key, plan.data)\n"
            "    for entry in plan.missing:\n"
            "        _copy_file("
        ),
        "tests/unit/checkpoint/test_mirroring.py -k whenever_it_dies",
    ),
    Mutant(
        "ckpt cp leaves out the ledger",
        "resilient/checkpoint/replicate.py",
        "    for segment in plan.segments:\n",
        "    for segment in ():\n",
        "tests/unit/checkpoint/test_mirroring.py -k ledger",
    ),
    Mutant(
        "ckpt cp copies only the records of the line of descent",
        "resilient/checkpoint/replicate.py",
        "(*plan.lives, *plan.others)",
        "plan.lives",
        "tests/cli/test_audited_lives.py -k elsewhere",
    ),
]
