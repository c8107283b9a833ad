"""Defects of the fence by token and of the puts that it guards."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FENCE = "tests/unit/checkpoint/test_fence_token.py"
GENERATIONS = "resilient/checkpoint/generations.py"
PUT = "resilient/checkpoint/fenced_put.py"
HANDED = "tests/process/test_fence_keeper.py"

MUTANTS = [
    Mutant(
        "the fence compares the number alone",
        GENERATIONS,
        ("    if token:\n        _require_own_record(store, generation, token)\n"),
        "",
        FENCE,
    ),
    Mutant(
        "the fence of a restored repository looks at the number alone",
        GENERATIONS,
        "        _require_own_record(store, generation, token)\n",
        "        pass\n",
        "tests/crash/test_restored_backup.py -k changes_nothing",
    ),
    Mutant(
        "the fence takes the record of another claim",
        GENERATIONS,
        '        if fields.get("token") == token:\n',
        '        if fields.get("token"):\n',
        FENCE,
    ),
    Mutant(
        "the fence lets a process go on whose record is gone",
        GENERATIONS,
        '        found = "was deleted"\n',
        "        return\n",
        f"{FENCE} -k record_gone",
    ),
    Mutant(
        "the fence stops a run whose record is damaged",
        GENERATIONS,
        "    except IntegrityError:\n        return\n    except KeyNotFound:\n        found",
        "    except (IntegrityError, KeyNotFound):\n        found",
        f"{FENCE} -k damaged_record",
    ),
    Mutant(
        "a file that is there is replaced without a look at the fence",
        PUT,
        "    fence()\n    if not is_committed",
        "    if not is_committed",
        FENCE,
    ),
    Mutant(
        "a file of a committed checkpoint is replaced",
        PUT,
        "    if not is_committed:\n",
        "    if True:\n",
        f"{FENCE} -k only_uncommitted",
    ),
    Mutant(
        "a commit looks at the number alone",
        "resilient/checkpoint/save/persist.py",
        "Signature(key, files) if key else None, context.token)",
        "Signature(key, files) if key else None)",
        f"{FENCE} -k later_step",
    ),
    Mutant(
        "a rotation looks at the number alone",
        "resilient/checkpoint/garbage_collection.py",
        ("    plan = apply_plan(store, found, generation, token)\n"),
        ("    plan = apply_plan(store, found, generation)\n"),
        f"{FENCE} -k rotation",
    ),
    Mutant(
        "a prune looks at the number alone",
        "cli/resilient_cli/commands/prune.py",
        "apply_plan(store, found, mine, token)",
        "apply_plan(store, found, mine)",
        f"{FENCE} -k prune_planned",
    ),
    Mutant(
        "a failed save deletes the files of another claim",
        "resilient/checkpoint/garbage_collection.py",
        "    if token:\n        check_fence(store, checkpoint.generation, token)\n",
        "",
        f"{FENCE} -k discard",
    ),
    Mutant(
        "a save that is handed over names no token",
        "resilient/checkpoint/daemon/messages.py",
        '        "token": job.token,\n',
        '        "token": "",\n',
        f"{HANDED} -k handed_over",
    ),
    Mutant(
        "the notes of a cached step name no token",
        "resilient/checkpoint/daemon/step_slots.py",
        '        "token": job.token,\n',
        '        "token": "",\n',
        f"{HANDED} -k cached_step",
    ),
]
