"""The interval between saves at which the least time is lost, by Young and by Daly (pure).

All lengths are seconds. ``cost`` (C) is what a save costs training, ``mtbf`` (M) the mean time
between failures of the run as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

PRIOR_SECONDS = 86_400.0
"""A run that has not failed yet is taken to fail once in the time it was seen and a day more."""

OVERHEAD_MAX = 0.05
SECONDS_MAX = 3600.0
# Lives that began because work was lost. What was asked to stop saved before it went, and who
# joins or leaves a run does that between two steps.
_LOSSES = frozenset({"failure", "hang", "rollback"})
HOST_LOSSES = frozenset({"membership"})
"""Causes of lives that began because a host went, or came: the record does not tell which."""

PROMOTING_SHARE_MAX = 0.5
"""Training does not wait for a promotion; the way to the store is to be free half of the time."""


@dataclass(frozen=True, slots=True)
class IntervalBounds:
    """Between what an interval stays; of two that contradict each other the longer one wins.

    Attributes:
        overhead_max: the share of time that saves may take, above 0 and below 1.
        seconds_max: the longest interval.
        land_seconds: what a save takes until it is whole: the next would only wait for it.
    """

    overhead_max: float = OVERHEAD_MAX
    seconds_max: float = SECONDS_MAX
    land_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """An interval and where it comes from.

    Attributes:
        seconds: from the end of one save to the beginning of the next.
        cost_seconds: C.
        mtbf_seconds: M.
        best_seconds: by the formula alone.
        bound: what made it another one: ``overhead``, ``landing``, ``longest``; empty if nothing.
    """

    seconds: float
    cost_seconds: float
    mtbf_seconds: float
    best_seconds: float
    bound: str = ""


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """What an interval costs in the long run.

    Attributes:
        saving_share: of the time that goes to saves.
        lost_share: of the time that is done again after failures.
        lost_seconds: of training that one failure loses in the mean.
    """

    saving_share: float
    lost_share: float
    lost_seconds: float

    @property
    def share(self) -> float:
        """Of the time that does not bring the run forward."""
        return min(1.0, self.saving_share + self.lost_share)


@dataclass(frozen=True, slots=True)
class FailureObservations:
    """How often a run has failed.

    Attributes:
        failures: lives that began because the one before lost work.
        observed_seconds: how long it was seen to run.
    """

    failures: int = 0
    observed_seconds: float = 0.0

    def mtbf_seconds(self, more_seconds: float = 0.0) -> float:
        """Return M: ``(observed + 24 h) / (failures + 1)``, defined for a run that never failed.

        Args:
            more_seconds: that the run has been seen since.
        """
        seen_seconds = self.observed_seconds + max(0.0, more_seconds)
        return (seen_seconds + PRIOR_SECONDS) / (self.failures + 1)


def best_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval at which saves and lost work together take the least time.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006) 303-312: with ``x = sqrt(C / 2M)`` it is
    ``sqrt(2CM) (1 + x/3 + x^2/9) - C`` for C below 2M, else M. Its first terms, ``sqrt(2CM) - C``,
    are Young's (1974) and nearly the same while C is small; alone they go to nothing as C comes
    near 2M. It grows with C and with M.

    Args:
        cost_seconds: at least 0.
        mtbf_seconds: above 0.
    """
    if cost_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    root = math.sqrt(cost_seconds / (2 * mtbf_seconds))
    young = math.sqrt(2 * cost_seconds * mtbf_seconds)
    return young * (1 + root / 3 + root * root / 9) - cost_seconds


def choose_interval(
    cost_seconds: float, mtbf_seconds: float, bounds: IntervalBounds
) -> SaveInterval:
    """Return the best interval within ``bounds``."""
    best = best_seconds(cost_seconds, mtbf_seconds)
    overhead = cost_seconds * (1 / bounds.overhead_max - 1)
    seconds, bound = best, ""
    if seconds > bounds.seconds_max:
        seconds, bound = bounds.seconds_max, "longest"
    for least, name in ((overhead, "overhead"), (bounds.land_seconds, "landing")):
        if seconds < least:
            seconds, bound = least, name
    return SaveInterval(seconds, cost_seconds, mtbf_seconds, best, bound)


def expect(
    seconds: float, cost_seconds: float, mtbf_seconds: float, land_seconds: float
) -> IntervalEstimate:
    """Return what an interval costs, to first order, for failures at any moment alike.

    A failure loses half an interval in the mean, and what was done while the last save was not
    whole yet.
    """
    lost_seconds = seconds / 2 + land_seconds
    saving = cost_seconds / (seconds + cost_seconds) if cost_seconds else 0.0
    return IntervalEstimate(saving, min(1.0, lost_seconds / mtbf_seconds), lost_seconds)


def observe(
    lives: Iterable[tuple[str, str]], losses: Collection[str] = _LOSSES
) -> FailureObservations:
    """Return how often a run has failed, by the records of its lives.

    The time of a life is known if the agent began the next one, within moments of its end. Nobody
    wrote down when a life ended that a new launch followed, so it counts as a life of no length;
    so does the last one.

    Args:
        lives: the cause of each and when it was claimed (ISO 8601), rising.
        losses: the causes that count.
    """
    failures, observed_seconds, before = 0, 0.0, None
    for cause, claimed_at in lives:
        at = _seconds(claimed_at)
        failures += cause in losses
        if cause != "start" and before is not None and at is not None:
            observed_seconds += max(0.0, at - before)
        before = at
    return FailureObservations(failures, observed_seconds)


def _seconds(moment: str) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return None
