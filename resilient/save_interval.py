"""Optimal save interval by the formulas of Young and Daly, as pure functions.

All lengths are seconds. ``cost`` (C) is the training time that a save costs. ``mtbf`` (M) is the
mean time between failures of the run as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

PRIOR_SECONDS = 86_400.0
"""Prior of one day: without a failure, the MTBF is the observed time plus one day."""

OVERHEAD_MAX = 0.05
SECONDS_MAX = 3600.0
# Causes of attempts that follow lost work. Other causes lose no work: a run that is asked to stop
# saves first, and a host joins or leaves between two steps.
_LOSSES = frozenset({"failure", "hang", "rollback"})
HOST_LOSSES = frozenset({"membership"})
"""Causes of attempts after a host left or joined; the record does not show which."""

PROMOTING_SHARE_MAX = 0.5
"""Largest share of the time for promotions. Training does not wait for a promotion, but the network
link should be free half of the time.
"""


@dataclass(frozen=True, slots=True)
class IntervalBounds:
    """Bounds of a save interval; if two bounds contradict each other, the longer interval applies.

    Attributes:
        overhead_max: Largest share of time for saves, above 0 and below 1.
        seconds_max: Longest interval.
        land_seconds: Seconds until a save is durable; before that, the next save would only wait.
    """

    overhead_max: float = OVERHEAD_MAX
    seconds_max: float = SECONDS_MAX
    land_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """Save interval and its derivation.

    Attributes:
        seconds: Seconds from the end of one save to the beginning of the next.
        cost_seconds: C.
        mtbf_seconds: M.
        best_seconds: Interval by the formula alone.
        bound: Bound that changed the interval: ``overhead``, ``landing``, ``longest``, or empty.
    """

    seconds: float
    cost_seconds: float
    mtbf_seconds: float
    best_seconds: float
    bound: str = ""


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """Expected long-run cost of a save interval.

    Attributes:
        saving_share: Share of the time spent in saves.
        lost_share: Share of the time spent repeating work after failures.
        lost_seconds: Mean training time that one failure loses.
    """

    saving_share: float
    lost_share: float
    lost_seconds: float

    @property
    def share(self) -> float:
        """Share of the time without progress."""
        return min(1.0, self.saving_share + self.lost_share)


@dataclass(frozen=True, slots=True)
class FailureObservations:
    """Observed failures of a run.

    Attributes:
        failures: Number of attempts that began because the previous attempt lost work.
        observed_seconds: Observed running time.
    """

    failures: int = 0
    observed_seconds: float = 0.0

    def mtbf_seconds(self, more_seconds: float = 0.0) -> float:
        """Return M: ``(observed + 24 h) / (failures + 1)``; defined also without failures.

        Args:
            more_seconds: Running time since the last record.
        """
        seen_seconds = self.observed_seconds + max(0.0, more_seconds)
        return (seen_seconds + PRIOR_SECONDS) / (self.failures + 1)


def best_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the interval that minimizes the time for saves and lost work together.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006) 303-312. With ``x = sqrt(C / 2M)`` the interval is
    ``sqrt(2CM) (1 + x/3 + x^2/9) - C`` for C below 2M, else M. The first terms, ``sqrt(2CM) - C``,
    are Young's formula (1974). Young's formula is a good estimate while C is small, but goes to 0
    as C approaches 2M. The interval grows with C and with M.

    Args:
        cost_seconds: C, at least 0.
        mtbf_seconds: M, above 0.
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
    for seconds_min, name in ((overhead, "overhead"), (bounds.land_seconds, "landing")):
        if seconds < seconds_min:
            seconds, bound = seconds_min, name
    return SaveInterval(seconds, cost_seconds, mtbf_seconds, best, bound)


def expect(
    seconds: float, cost_seconds: float, mtbf_seconds: float, land_seconds: float
) -> IntervalEstimate:
    """Return the first-order cost of an interval, for failures that are equally likely at any time.

    On average, a failure loses half an interval, plus the work done while the last save was not yet
    durable.
    """
    lost_seconds = seconds / 2 + land_seconds
    saving = cost_seconds / (seconds + cost_seconds) if cost_seconds else 0.0
    return IntervalEstimate(saving, min(1.0, lost_seconds / mtbf_seconds), lost_seconds)


def observe(
    starts: Iterable[tuple[str, str]], losses: Collection[str] = _LOSSES
) -> FailureObservations:
    """Count the failures of a run from the records of its attempts.

    The length of an attempt is known only if the same agent began the next attempt, moments after
    its end. If a new agent run followed, the end is not recorded. Such an attempt counts with
    length 0, and so does the last attempt.

    Args:
        starts: Cause and claim time (ISO 8601) of each attempt, in rising order.
        losses: Causes that count as failures.
    """
    failures, observed_seconds, previous_time = 0, 0.0, None
    for cause, claimed_at in starts:
        at = _seconds(claimed_at)
        failures += cause in losses
        if cause != "start" and previous_time is not None and at is not None:
            observed_seconds += max(0.0, at - previous_time)
        previous_time = at
    return FailureObservations(failures, observed_seconds)


def _seconds(moment: str) -> float | None:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return None
