"""Where in a row something went from good to bad, asked of as few as possible (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Item = TypeVar("Item")


class Verdict(StrEnum):
    """What was found of one."""

    GOOD = "good"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Change(Generic[Item]):
    """Between which two it changed.

    Attributes:
        last_good: the last that is known to be good.
        first_bad: the first that is known to be bad.
        unknown: those between the two, of which nothing could be said.
    """

    last_good: Item
    first_bad: Item
    unknown: tuple[Item, ...]


def find_change(row: Sequence[Item], judge: Callable[[Item, int], Verdict]) -> Change[Item]:
    """Return where a row that begins good and ends bad changes; one of the places if of several.

    Half of what is left is ruled out by each verdict. Of one that is unknown nothing is concluded:
    its neighbours are asked, the nearest first.

    Args:
        row: at least two; the first is good and the last is bad.
        judge: told which one, and how many are left to be asked with it.
    """
    good, bad = 0, len(row) - 1
    unknown: set[int] = set()
    while left := [one for one in range(good + 1, bad) if one not in unknown]:
        middle = (good + bad) / 2
        at = min(left, key=lambda one: abs(one - middle))
        verdict = judge(row[at], len(left))
        if verdict is Verdict.GOOD:
            good = at
        elif verdict is Verdict.BAD:
            bad = at
        else:
            unknown.add(at)
    return Change(row[good], row[bad], tuple(row[good + 1 : bad]))
