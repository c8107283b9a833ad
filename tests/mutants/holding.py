"""Defects of steps that only memory holds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HELD = "tests/process/test_held_steps.py"
CHOICE = "tests/unit/vault/test_choose_step.py"
PEEK = "tests/unit/train/test_peeking.py"
AGAIN = "tests/unit/state/test_known_again.py"
SEAT = "resilient/vault/keeper/holding.py"
RECALL = "resilient/state/recall.py"

ASKING = "tests/unit/state/test_asked_state.py"

MUTANTS = [
    Mutant(
        "what is hooked to a module's state is passed over",
        "resilient/state/asking.py",
        '        or own["_state_dict_hooks"]\n',
        "",
        ASKING,
    ),
    Mutant(
        "a buffer is stored that a module does not store",
        "resilient/state/asking.py",
        "if one is not None and name not in passing:",
        "if one is not None:",
        ASKING,
    ),
    Mutant(
        "what is hooked to an optimizer's state is passed over",
        "resilient/state/optimizer.py",
        "        and not optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001\n",
        "",
        ASKING,
    ),
    Mutant(
        "copies of a held step do not wait for a lull",
        "resilient/overlap.py",
        "        begin.wait()\n",
        "        pass\n",
        "tests/unit/test_overlap.py",
    ),
    Mutant(
        "a step lands that one rank holds",
        SEAT,
        "set.intersection(*(set(one) for one in held))",
        "set.union(*(set(one) for one in held))",
        CHOICE,
    ),
    Mutant(
        "a step lands that is older than what is committed",
        SEAT,
        "is_newest = not there or there[0] < newest",
        "is_newest = True",
        CHOICE,
    ),
    Mutant(
        "the loss of a step is summed before the step before it is copied",
        "resilient/train/run.py",
        '        with timing("saving", _STALL_SECONDS):\n            self.saver.before_update()\n'
        "        if self.saver.will_hold():\n",
        "        if self.saver.will_hold():\n            self.meters.begin_mean()\n"
        '        with timing("saving", _STALL_SECONDS):\n            self.saver.before_update()\n'
        "        if False:\n",
        "tests/unit/train/test_begun_means.py",
    ),
    Mutant(
        "a sum that was begun is not waited for",
        "resilient/train/measures/meters.py",
        "        self.work.wait()\n",
        "",
        "tests/process/test_means.py",
    ),
    Mutant(
        "a step lands on top of a save that failed",
        SEAT,
        "is_rooted = not after or any(one.folder == after for one in there)",
        "is_rooted = True",
        CHOICE,
    ),
    Mutant(
        "a slot that is overwritten counts as whole",
        SEAT,
        "            self._whole.pop(_slot(asked), None)\n",
        "            pass\n",
        f"{HELD} -k overwritten",
    ),
    Mutant(
        "what was given up lands all the same",
        SEAT,
        "    def _drop(self, _asked: Mapping[str, Any]) -> dict[str, Any]:\n"
        '        """Forget everything: the rank goes on from something older, on purpose."""\n'
        "        with self._lock:\n            self._whole.clear()\n",
        "    def _drop(self, _asked: Mapping[str, Any]) -> dict[str, Any]:\n"
        '        """Forget everything: the rank goes on from something older, on purpose."""\n',
        f"{HELD} -k given_up",
    ),
    Mutant(
        "a new life does not wait for the ranks of the old one",
        "resilient/vault/keeper/keeper.py",
        "(older := self._holding_before(guest)) or self._is_saving(guest.url)",
        "(older := list[HoldSeat]()) or self._is_saving(guest.url)",
        f"{HELD} -k waited_for",
    ),
    Mutant(
        "what a rank told counts only until it dies",
        "resilient/vault/keeper/keeper.py",
        "                with suppress(OSError):\n                    lines.send(answer)\n",
        "                lines.send(answer)\n",
        f"{HELD} -k busy_keeper",
    ),
    Mutant(
        "a held step lands before the save that is on its way",
        SEAT,
        "if self._whole and not self._settled(self):",
        "if False:",
        f"{HELD} -k newest_save",
    ),
    Mutant(
        "a peek forgets what a save then lacks",
        "resilient/train/rows.py",
        "        self._entries += len(new)\n",
        "        self._entries += len(new)\n        entries.clear()\n",
        PEEK,
    ),
    Mutant(
        "steps of an older chain are told on",
        "resilient/train/rows.py",
        "self._of is None or self._of[0] is not chain or self._of[1] is not entries",
        "self._of is None",
        PEEK,
    ),
    Mutant(
        "keys and kinds of containers are taken for the known ones",
        RECALL,
        "walk.places == self._places and ",
        "",
        AGAIN,
    ),
    Mutant(
        "a place in a container is taken for another",
        RECALL,
        "        self.places.append(key)\n        return self.visit(value)",
        "        return self.visit(value)",
        AGAIN,
    ),
    Mutant(
        "another dtype of the same memory is not seen",
        RECALL,
        "[*map(_dtype, live)] != self._dtypes",
        "len(live) != len(self._dtypes)",
        AGAIN,
    ),
    Mutant(
        "other memory in the same place is not seen",
        RECALL,
        "all(map(torch.Tensor.is_set_to, live, self._seen))",
        "len(live) == len(self._seen)",
        AGAIN,
    ),
    Mutant(
        "changes are counted by a tensor that training no longer has",
        RECALL,
        "[*map(_changes, live)] == [*map(_changes, self._seen)]",
        "len(live) == len(self._seen)",
        AGAIN,
    ),
    Mutant(
        "a key that looks like a tag is one",
        RECALL,
        '        if not _WORDS.issuperset(map(type, value)) or "$" in "".join(value):',
        "        if not _WORDS.issuperset(map(type, value)):",
        AGAIN,
    ),
    Mutant(
        "memory that a storage no longer has is copied",
        "resilient/state/copying.py",
        "if addresses != self._addresses:",
        "if not self._addresses:",
        AGAIN,
    ),
    Mutant(
        "a copy that is made again counts changes from its first time",
        "resilient/state/haste.py",
        "            one.renew()",
        "            pass",
        AGAIN,
    ),
    Mutant(
        "a file is copied to where it was in memory that is gone",
        "resilient/state/arena.py",
        "        self.splits.forget(name)\n",
        "",
        AGAIN,
    ),
    Mutant(
        "what is no longer steady is still copied later",
        "resilient/state/haste.py",
        "known is None or known.steady != steady",
        "known is None",
        AGAIN,
    ),
    Mutant(
        "a storage is known by where a tensor begins in it",
        "resilient/state/steady.py",
        " and not any(map(torch.Tensor.storage_offset, held))",
        "",
        AGAIN,
    ),
    Mutant(
        "a header that says other numbers is the one before",
        "resilient/state/drafts.py",
        "elif not is_spelled_alike(tree, part.tree):",
        "elif False:",
        AGAIN,
    ),
    Mutant(
        "a layout that changed is not told",
        "resilient/vault/keeper/holder.py",
        "if told.get(one.name, ()) != one.tensors",
        "if one.name not in told",
        HELD,
    ),
    Mutant(
        "a layout is told for both slots",
        "resilient/vault/keeper/holder.py",
        "told = self._layouts.setdefault(slot, {})",
        "told = self._layouts.setdefault(0, {})",
        HELD,
    ),
]
