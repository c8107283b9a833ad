"""Defects of what rivals do to each other, which the simulator found or must find."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RIVALS = "tests/unit/checkpoint/test_rivals.py"
SLICE = "tests/simulation -k slice"

MUTANTS = [
    Mutant(
        "what was rotated away between two looks counts as lost at once",
        "resilient/checkpoint/resume_selection.py",
        "_LOOKS_MAX = 5",
        "_LOOKS_MAX = 1",
        RIVALS,
    ),
    Mutant(
        "lives are listed after checkpoints",
        "resilient/checkpoint/catalog.py",
        "    numbers = list_numbers(store) if numbers is None else numbers\n"
        "    folders = folders_of(store) if folders is None else folders\n",
        "    folders = folders_of(store) if folders is None else folders\n"
        "    numbers = list_numbers(store) if numbers is None else numbers\n",
        RIVALS,
    ),
    Mutant(
        "a life begins from what a rival has rotated away",
        "resilient/checkpoint/start_generation.py",
        "        _require_parent(context.store, choice)\n",
        "",
        RIVALS,
    ),
    Mutant(
        "an older life commits, as the simulator sees it",
        "resilient/checkpoint/commit.py",
        "    check_fence(store, checkpoint.generation, token)\n",
        "",
        SLICE,
    ),
    Mutant(
        "two lives take one number, as the simulator sees it",
        "resilient/checkpoint/generations.py",
        "        store.put_new(key, data)\n        return\n",
        "        store.put(key, data)\n        return\n",
        SLICE,
    ),
    Mutant(
        "a rank stops where it is, as the simulator sees it",
        "resilient/train/preemption.py",
        "self._agree(max((step, batch) for step, batch in turns))",
        "self._agree(self._entered)",
        SLICE,
    ),
]
