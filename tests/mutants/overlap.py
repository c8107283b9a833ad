"""Defects of saves that copy beside training."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OVERLAP = "tests/unit/test_overlap.py"
TRAINER = "tests/unit/train/test_overlapped_saves.py"

MUTANTS = [
    Mutant(
        "training does not wait for the copy",
        "resilient/checkpoint_engine.py",
        "            self._copies.make()\n            self._work.exception()\n",
        "            pass\n",
        f"{OVERLAP} -k forward_steps",
    ),
    Mutant(
        "training waits for the copy and not for the hand-over",
        "resilient/checkpoint_engine.py",
        "            self._copies.make()\n            self._work.exception()\n",
        "            self._copies.make()\n",
        f"{OVERLAP} -k stall_that_is_told",
    ),
    Mutant(
        "who waits for a save ahead of the next is not told as a stall",
        "resilient/checkpoint_engine.py",
        "            with self._stall.running():\n                self._persister.wait()\n",
        "            self._persister.wait()\n",
        f"{OVERLAP} -k asked_first",
    ),
    Mutant(
        "the trainer does not wait before its optimizer's step",
        "resilient/train/trainer.py",
        "        run.wait_for_copy(self._timing)\n        fire(",
        "        fire(",
        TRAINER,
    ),
    Mutant(
        "the trainer does not wait before an evaluation",
        "resilient/train/trainer.py",
        "            run.saver.before_update()\n            run.strategy.align(run.model)\n",
        "            run.strategy.align(run.model)\n",
        f"{TRAINER} -k swap_weights",
    ),
    Mutant(
        "what a forward pass changes is copied beside it",
        "resilient/state_dict/staging.py",
        ("if is_deferrable(source, steady, small):"),
        "if steady:",
        f"{OVERLAP} -k forward_steps",
    ),
    Mutant(
        "a loop that promised nothing is held to it",
        "resilient/checkpoint_engine.py",
        ("stable_storages(parts) if overlap else ()"),
        ("stable_storages(parts)"),
        f"{OVERLAP} -k without_overlap",
    ),
    Mutant(
        "parameters that no optimizer holds count as steady",
        "resilient/state_dict/staging.py",
        "    return _held(optimizer) if optimizer is not None else ()\n",
        "    if isinstance(stateful, torch.nn.Module):\n        return stateful.parameters()\n"
        "    return _held(optimizer) if optimizer is not None else ()\n",
        f"{OVERLAP} -k is_steady",
    ),
    Mutant(
        "a copy of two moments is committed",
        "resilient/state_dict/host_copy.py",
        "        if changed:\n",
        "        if False:\n",
        f"{OVERLAP} -k promise",
    ),
    Mutant(
        "what was copied is kept until the next save",
        "resilient/checkpoint_engine.py",
        "        copies.forget()\n",
        "        pass\n",
        f"{OVERLAP} -k let_go_of",
    ),
    Mutant(
        "a held step is copied beside training that has every core",
        "resilient/in_memory_steps.py",
        (" or has_idle_core(ranks, self._cores)"),
        " or True",
        "tests/process/test_held_beside.py",
    ),
    Mutant(
        "training waits for a copy however long it is",
        "resilient/in_memory_steps.py",
        "self._size_bytes > _LULL_BYTES_MAX or ",
        "",
        "tests/process/test_held_beside.py",
    ),
    Mutant(
        "a change counts that is counted at once",
        "resilient/state_dict/host_copy.py",
        "            self._missing -= 1\n",
        (
            "            self._missing -= 1\n"
            "            if not batch.changed():\n"
            "                self._work.remove(batch)\n"
        ),
        "tests/unit/state_dict/test_known_again.py -k counted_after",
    ),
    Mutant(
        "a held step is not looked at again before an update",
        "resilient/in_memory_steps.py",
        "            self._prove(*unproved)\n",
        "            pass\n",
        "tests/process/test_held_beside.py -k being_changed",
    ),
    Mutant(
        "a held step that was being changed stays said",
        "resilient/in_memory_steps.py",
        ("            capture_failure(partial(self._holder.invalidate, slot))\n"),
        "",
        "tests/process/test_held_beside.py -k being_changed",
    ),
    Mutant(
        "memory that stands for other numbers is taken for the same",
        "resilient/state_dict/flatten.py",
        "    if (left.is_conj(), left.is_neg()) != (right.is_conj(), right.is_neg()):\n",
        "    if False:\n",
        "tests/unit/state_dict/test_naming.py",
    ),
    Mutant(
        "what is spoiled is written all the same",
        "resilient/checkpoint/save/persist.py",
        ("        division: Any = job.spoiled or capture_failure("),
        ("        division: Any = capture_failure("),
        f"{OVERLAP} -k spoils",
    ),
    Mutant(
        "what is spoiled is forgotten on the way to the keeper",
        "resilient/checkpoint/daemon/messages.py",
        'job.spoiled.to_json()["failure"] if job.spoiled else None',
        "None",
        "tests/process/test_keeper_overlap.py -k spoiled",
    ),
]
