"""The wall clock, cut into pieces that each have one class: they touch, and sum to the whole."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from resilient.accounting.lives import Launch
    from resilient.accounting.spans import Doing


class Spent(StrEnum):
    """What a second was spent on."""

    TRAINING = "training"
    """Steps whose work is part of the result."""
    LOST = "lost"
    """Steps that were rolled back or died with their life, and were or must be done again."""
    EVALUATION = "evaluation"
    SAVE_STALL = "save_stall"
    """Training waited for a save."""
    RESTORE = "restore"
    """Reading and proving a checkpoint."""
    START = "start"
    """An agent or its workers started, until training began."""
    RENDEZVOUS = "rendezvous"
    """Waiting for the other hosts."""
    DETECT = "detect"
    """Nothing moved, and nobody knew yet: from the last sign of a hang to its finding."""
    TEARDOWN = "teardown"
    """From the first sign of a failure to the end of the last worker."""
    WAIT = "wait"
    """Between two lives: the decision, and the pause before the next."""
    FINISH = "finish"
    """After the last step: what is in flight lands, processes end."""
    DOWN = "down"
    """No agent was there."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A piece of the wall clock.

    Attributes:
        began_ms: milliseconds since 1970.
        ended_ms: of its end, which is the beginning of the next.
        spent: its class.
        life: which life's it is, 0 for none.
    """

    began_ms: int
    ended_ms: int
    spent: Spent
    life: int

    @property
    def length_ms(self) -> int:
        """How long it is."""
        return self.ended_ms - self.began_ms


class Timeline:
    """A stretch of time that is painted over, piece by piece; every moment has one colour.

    Args:
        began_ms: of the whole.
        ended_ms: of the whole; nothing is painted beyond.
    """

    def __init__(self, began_ms: int, ended_ms: int) -> None:
        self._ended_ms = max(began_ms, ended_ms)
        self._cuts = [began_ms]
        self._colours = [(Spent.DOWN, 0)]

    def paint(
        self,
        began_ms: int,
        ended_ms: int,
        spent: Spent,
        life: int = 0,
        only: Collection[Spent] = (),
    ) -> None:
        """Give what lies between two moments a class; ``only`` what has one of those now."""
        began_ms = max(began_ms, self._cuts[0])
        ended_ms = min(ended_ms, self._ended_ms)
        if began_ms >= ended_ms:
            return
        first, last = self._cut(began_ms), self._cut(ended_ms)
        for nth in range(first, last):
            if not only or self._colours[nth][0] in only:
                self._colours[nth] = (spent, life)

    def intervals(self) -> tuple[Interval, ...]:
        """Return the pieces by time; neighbours differ."""
        found: list[Interval] = []
        for (began_ms, ended_ms), colour in zip(
            pairwise([*self._cuts, self._ended_ms]), self._colours, strict=True
        ):
            if found and (found[-1].spent, found[-1].life) == colour:
                found[-1] = Interval(found[-1].began_ms, ended_ms, *colour)
            elif began_ms < ended_ms:
                found.append(Interval(began_ms, ended_ms, *colour))
        return tuple(found)

    def _cut(self, at_ms: int) -> int:
        """Return which piece begins at a moment, after cutting there."""
        nth = bisect_left(self._cuts, at_ms)
        if at_ms < self._ended_ms and (nth == len(self._cuts) or self._cuts[nth] != at_ms):
            self._cuts.insert(nth, at_ms)
            self._colours.insert(nth, self._colours[nth - 1])
        return nth


def paint_launches(line: Timeline, launches: Sequence[Launch], doings: Sequence[Doing]) -> None:
    """Paint what agents did around their lives."""
    for launch in launches:
        lives = [one.life for one in doings if launch.agent in one.life.agents]
        line.paint(launch.began_ms, launch.ended_ms, Spent.WAIT)
        begins_ms = min((one.began_ms for one in lives), default=launch.ended_ms)
        line.paint(launch.began_ms, begins_ms, Spent.START)
        ends_ms = max((one.ended_ms for one in lives), default=launch.ended_ms)
        line.paint(ends_ms, launch.ended_ms, Spent.FINISH)


def paint_life(line: Timeline, one: Doing) -> None:
    """Paint what a life did, over what its agents did around it."""
    life, training = one.life, one.training
    paint = line.paint
    number, ended_ms = life.number, life.ended_ms
    paint(life.began_ms, life.started_ms, Spent.RENDEZVOUS, number)
    paint(life.started_ms, ended_ms, Spent.START, number)
    if one.restore:
        paint(one.restore.began_ms, one.restore.ended_ms, Spent.RESTORE, number, {Spent.START})
    if training:
        paint(training.began_ms, training.ended_ms, Spent.TRAINING, number)
        for span in one.evaluations:
            paint(span.began_ms, span.ended_ms, Spent.EVALUATION, number, {Spent.TRAINING})
        within = {Spent.TRAINING, Spent.EVALUATION}
        for span in one.stalls:
            paint(span.began_ms, span.ended_ms, Spent.SAVE_STALL, number, within)
        paint(training.ended_ms, ended_ms, Spent.FINISH, number)
    if one.failed_ms is None:
        return
    if one.hung_ms is not None:
        paint(max(one.hung_ms, life.started_ms), one.failed_ms, Spent.DETECT, number)
    paint(one.failed_ms, ended_ms, Spent.TEARDOWN, number)
