"""Defects of steps that only memory holds."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HELD = "tests/process/test_held_steps.py"
CHOICE = "tests/unit/vault/test_choose_step.py"
PEEK = "tests/unit/train/test_peeking.py"
SEAT = "resilient/vault/keeper/holding.py"

MUTANTS = [
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
]
