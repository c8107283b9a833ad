"""Whether a rank is stuck before training, or after it: nobody knows how long that takes (pure).

============================== ========================================================
a rank is                      it is overdue the patience after
============================== ========================================================
not heard of, or not in        the last sign of any rank, while another one waits that has
training yet (`starting`)      come further, and before any of them has done a step
out of training (`ending`)     the end of another rank with 0, or a later sign of any rank,
                               once none is in training any more
============================== ========================================================

A slow start is no hang, and neither is a job that its ranks leave one after the other. So somebody
has to wait; and a rank that was never heard of is blamed only where another one cannot begin
without it. A job whose ranks show no signs is never judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from resilient.agent.health.heartbeat import Hang, Overdue, suspicion
from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.agent.health.heartbeat import HangRule
    from resilient.world.pulse import Signs

STARTING = "starting"
ENDING = "ending"


class Reach(IntEnum):
    """How far a rank came."""

    NOWHERE = 0
    STARTED = 1
    TRAINING = 2
    LEFT = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank that runs.

    Attributes:
        rank: among all.
        signs: what it showed last, None when nothing.
        state: of its process, as the kernel has it.
    """

    rank: int
    signs: Signs | None = None
    state: str = ""

    @property
    def reach(self) -> Reach:
        """How far it came."""
        if self.signs is None:
            return Reach.NOWHERE
        if self.signs.phase is not Phase.OUTSIDE:
            return Reach.TRAINING
        return Reach.LEFT if self.signs.has_trained else Reach.STARTED

    @property
    def step(self) -> int:
        """The last step that it finished, -1 before the first."""
        return -1 if self.signs is None else self.signs.step

    def quiet_since(self, from_seconds: float) -> float:
        """Return when it showed its last sign, at the earliest ``from_seconds``."""
        return max(from_seconds, self.signs.since_seconds if self.signs else from_seconds)


def find_starting(seen: Collection[Seen]) -> list[Seen]:
    """Return the ranks that others wait for before the first step; none if nobody waits."""
    reaches = [one.reach for one in seen if one.reach is not Reach.LEFT]
    if not reaches or min(reaches) == max(reaches) or any(one.step >= 0 for one in seen):
        return []
    return [one for one in seen if one.reach is min(reaches)]


def find_stuck_start(
    seen: Collection[Seen], rule: HangRule, began_seconds: float, now_seconds: float
) -> Hang | None:
    """Return the hang of a group whose ranks do not all get into training.

    Args:
        seen: the ranks that run.
        rule: its patience is how long nobody may show a sign.
        began_seconds: when the ranks were started, on the monotonic clock.
        now_seconds: on the same.
    """
    quiet_since = max([began_seconds, *(one.quiet_since(began_seconds) for one in seen)])
    starting = find_starting(seen)
    if not starting or now_seconds - quiet_since <= rule.patience_seconds:
        return None
    return _hang_of(starting, STARTING, rule, began_seconds, now_seconds)


def find_stuck_end(
    seen: Collection[Seen], rule: HangRule, ended_seconds: float | None, now_seconds: float
) -> Hang | None:
    """Return the hang of a group of which a rank has ended, and the others do not.

    Args:
        seen: the ranks that run.
        rule: its patience is how long nobody may show a sign.
        ended_seconds: when the first rank had ended with 0, None while none has.
        now_seconds: on the monotonic clock.
    """
    if ended_seconds is None or not are_quiet(seen, rule, ended_seconds, now_seconds):
        return None
    heard = [one for one in seen if one.signs is not None]
    return _hang_of(heard, ENDING, rule, ended_seconds, now_seconds)


def are_quiet(
    seen: Collection[Seen], rule: HangRule, from_seconds: float, now_seconds: float
) -> bool:
    """Say whether ranks were heard of, but none trains, and none showed a sign for the patience."""
    heard = [one for one in seen if one.signs is not None]
    if not heard or any(one.reach is Reach.TRAINING for one in heard):
        return False
    last_seconds = max(one.quiet_since(from_seconds) for one in heard)
    return now_seconds - last_seconds > rule.patience_seconds


def _hang_of(
    ranks: Collection[Seen], edge: str, rule: HangRule, from_seconds: float, now_seconds: float
) -> Hang:
    late = [
        Overdue(
            rank=one.rank,
            step=one.step,
            phase=Phase.OUTSIDE,
            state=one.state,
            waited_seconds=now_seconds - one.quiet_since(from_seconds),
            deadline_seconds=rule.patience_seconds,
            edge=edge,
        )
        for one in ranks
    ]
    return Hang(tuple(sorted(late, key=suspicion)))
