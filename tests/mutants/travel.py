"""Defects of going back by hand, of taking it back, and of what is kept for that."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BACK = "tests/unit/checkpoint/test_going_back.py"
MOVES = "resilient/checkpoint/reflog.py"
TRAVEL = "resilient/checkpoint/rollback.py"

MIRROR = "resilient/checkpoint/replicate.py"
MIRRORING = "tests/unit/checkpoint/test_mirroring.py"
BISECT = "tests/cli/test_bisect.py"
WRITERS = "resilient/checkpoint/fencing.py"
SHUT = "tests/unit/checkpoint/test_shutting_out.py"
WITNESS = "cli/resilient_cli/liveness.py"
UNLOCK = "tests/cli/test_unlocking.py"

MUTANTS = [
    Mutant(
        "going back claims no life, so nothing is fenced and nothing moves",
        TRAVEL,
        "    check_fence(store, generation.number, generation.token)\n",
        "    store.delete(f'generations/g{generation.number:06d}.json')\n",
        f"{BACK} -k adds_one_record",
    ),
    Mutant(
        "going back begins from the newest",
        TRAVEL,
        "        journey.after,\n        cause=",
        "        journey.before,\n        cause=",
        f"{BACK} -k adds_one_record",
    ),
    Mutant(
        "a damaged target is gone back to",
        TRAVEL,
        "    if damaged:\n",
        "    if False:\n",
        f"{BACK} -k damaged_target",
    ),
    Mutant(
        "who was outranked at the same moment hears that it went back",
        TRAVEL,
        "    check_fence(store, generation.number, generation.token)\n",
        "",
        f"{BACK} -k two_who_go_back",
    ),
    Mutant(
        "a target that a rotation took is called gone back to",
        TRAVEL,
        "        store.stat(journey.after.manifest_key)\n",
        "        pass\n",
        f"{BACK} -k rotation_takes",
    ),
    Mutant(
        "an undo is undone by the next undo",
        MOVES,
        "                open_moves.pop()\n",
        "                open_moves.append(number)\n",
        f"{BACK} -k one_after_the_other",
    ),
    Mutant(
        "undo takes the trainer's own rollback back",
        MOVES,
        'ROLLBACK = "ckpt-rollback"\n',
        'ROLLBACK = "rollback"\n',
        f"{BACK} -k of_the_trainer_itself",
    ),
    Mutant(
        "undo goes to where the life before began and not to where it ended",
        MOVES,
        "            if own:\n",
        "            if own and self._lives[number].parent:\n",
        f"{BACK} -k one_after_the_other",
    ),
    Mutant(
        "undo guesses over a record that it cannot read",
        MOVES,
        ("            if generation is None:\n                raise IntegrityError("),
        (
            "            if generation is None:\n"
            "                continue\n"
            "            if generation is None:\n"
            "                raise IntegrityError("
        ),
        f"{BACK} -k does_not_guess",
    ),
    Mutant(
        "a rotation deletes what a person left",
        MOVES,
        "                if generation.cause in BY_HAND:\n",
        "                if False:\n",
        f"{BACK} -k keeps_what_a_person_left",
    ),
    Mutant(
        "a rotation keeps what a stale process saved",
        MOVES,
        "                break\n",
        "                pass\n",
        f"{BACK} -k restart_left_before",
    ),
    Mutant(
        "prune deletes what undo goes back to",
        MOVES,
        '    elif left == "undo":\n',
        '    elif left == "never":\n',
        f"{BACK} -k prune_keeps",
    ),
    Mutant(
        "a moment means what was saved after it",
        "resilient/checkpoint/refs.py",
        "created_at) <= moment:\n",
        "created_at) >= moment:\n",
        f"{BACK} -k moment_means",
    ),
    Mutant(
        "a copy takes bytes that are not what was saved",
        MIRROR,
        "        if digest_file(data) != entry.proof:\n",
        "        if False:\n",
        f"{MIRRORING} -k damage",
    ),
    Mutant(
        "a copy comes into a repository where the run went on",
        MIRROR,
        "    if newest > own_generation:\n",
        "    if False:\n",
        f"{MIRRORING} -k goes_on",
    ),
    Mutant(
        "a copy mixes two runs",
        MIRROR,
        "    if runs:\n",
        "    if False:\n",
        f"{MIRRORING} -k another_run",
    ),
    Mutant(
        "a copy has its manifest before its files",
        MIRROR,
        "    for entry in shipment.missing:\n        _carry(",
        "    put_manifest(target, manifest.checkpoint.manifest_key, shipment.data)\n"
        "    for entry in shipment.missing:\n        _carry(",
        f"{MIRRORING} -k whenever_it_dies",
    ),
    Mutant(
        "a copy has no ledger",
        MIRROR,
        "    for segment in shipment.segments:\n",
        "    for segment in ():\n",
        f"{MIRRORING} -k ledger",
    ),
    Mutant(
        "what is known of nothing counts as good in a bisection",
        "cli/resilient_cli/commands/bisect.py",
        "            unknown.add(at)\n",
        "            good = at\n",
        BISECT,
    ),
    Mutant(
        "a bisection goes through a life that its bad end never saw",
        "resilient/checkpoint/catalog.py",
        "committed(store), numbers), checkpoint)[0]",
        "committed(store), numbers), max(committed(store)))[0]",
        BISECT,
    ),
    Mutant(
        "a command that a signal ended says that a checkpoint is bad",
        "cli/resilient_cli/commands/bisect.py",
        "        if not 0 <= done.returncode <= _STATUS_MAX:\n",
        "        if False:\n",
        BISECT,
    ),
    Mutant(
        "a damaged checkpoint is shown to the command of a bisection",
        "cli/resilient_cli/commands/bisect.py",
        'if one.severity == "damaged"]',
        "if False]",
        BISECT,
    ),
    Mutant(
        "to shut a writer out abandons what it saved a moment before",
        WRITERS,
        "        head = _resume_below(store, first)\n",
        "        head = head if first else _resume_below(store, first)\n",
        f"{SHUT} -k a_moment_before",
    ),
    Mutant(
        "to shut a writer out claims no life",
        WRITERS,
        "        first = first or generation.number\n",
        (
            "        first = first or generation.number\n"
            "        store.delete(f'generations/g{generation.number:06d}.json')\n"
        ),
        f"{SHUT} -k fenced",
    ),
    Mutant(
        "a life that lost its record is nobody's",
        WRITERS,
        "        by_command = self.record is not None and self",
        "        by_command = self.record is None or self",
        f"{SHUT} -k damaged_record",
    ),
    Mutant(
        "what a life by command left unfinished is not seen",
        WRITERS,
        " and not self.unfinished\n",
        "\n",
        f"{SHUT} -k saves_all_the_same",
    ),
    Mutant(
        "a writer that lives is shut out without a word",
        "cli/resilient_cli/commands/unlock.py",
        "    if acts and is_alive and not force:\n",
        "    if acts and is_alive and force:\n",
        f"{UNLOCK} -k lives_here",
    ),
    Mutant(
        "a launcher that ended long ago answers for a life that began later elsewhere",
        WITNESS,
        "    if agent.host != writer.record.host:\n        return False\n",
        "",
        f"{UNLOCK} -k somebody_else",
    ),
    Mutant(
        "a machine that is silent is dead",
        WITNESS,
        "    return LivenessReport(LivenessState.UNKNOWN, why, agent, told_ms)\n",
        "    return LivenessReport(LivenessState.DEAD, why, agent, told_ms)\n",
        f"{UNLOCK} -k elsewhere",
    ),
]
