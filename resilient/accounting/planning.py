"""What is known of a run's saves, and how often to make them (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.accounting.timeline import Spent
from resilient.interval import (
    PROMOTING_SHARE_MAX,
    Bounds,
    Expectation,
    History,
    choose_interval,
    expect,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.accounting.account import Account
    from resilient.accounting.records import Record
    from resilient.interval import Interval

MARGIN_SECONDS = 3.0
"""What the agent keeps of a deadline for itself, and what a save is given on top of its p95."""
_NO_LOSS = frozenset({"preemption", "resize"})
_HOST_LOST = frozenset({"agent_lost", "host_lost", "rendezvous_lost"})
_MEDIAN, _P95 = 0.5, 0.95


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, in seconds; None where nothing was measured."""

    count: int
    p50: float | None
    p95: float | None

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        """Return the nearest-rank percentiles."""
        if not seconds:
            return Times(0, None, None)
        ordered = sorted(seconds)
        p50, p95 = (ordered[math.ceil(one * len(ordered)) - 1] for one in (_MEDIAN, _P95))
        return Times(len(ordered), p50, p95)


@dataclass(frozen=True, slots=True)
class Known:
    """What a plan is made from.

    Attributes:
        saving: from capture to manifest.
        stalling: how long training waited for a save.
        promoting: from the near tier to the durable one.
        step_seconds: what a step takes; 0 if no step was seen.
        failures: of anything, with the time that they were seen in.
        host_losses: of whole hosts, likewise.
    """

    saving: Times
    stalling: Times
    promoting: Times
    step_seconds: float
    failures: History
    host_losses: History


@dataclass(frozen=True, slots=True)
class TierPlan:
    """How often a tier should take a save.

    Attributes:
        tier: ``saves``, or ``durable`` for the promotions of a near tier.
        interval: the best one within bounds.
        expected: what intervals cost, by name: ``half``, ``best``, ``double``, ``asked``.
        seconds: the intervals themselves, by the same names.
    """

    tier: str
    interval: Interval
    seconds: dict[str, float]
    expected: dict[str, Expectation]


def know(found: Account, told: Sequence[Record]) -> Known:
    """Return what the events of a run say of its saves and failures."""
    spent = found.spent_ms
    worked_ms = spent[Spent.TRAINING] + spent[Spent.LOST]
    steps = found.now.step + found.lost_steps
    seen_seconds = (found.wall_ms - spent[Spent.DOWN]) / 1000
    causes = [one.cause for one in found.faults]
    promoted = [one for one in told if one.event == "CheckpointPromoted"]
    return Known(
        saving=Times.of([one.commit_ms / 1000 for one in found.saved]),
        stalling=Times.of([one.stall_ms / 1000 for one in found.saved]),
        promoting=Times.of([one.number("took_seconds") for one in promoted]),
        step_seconds=worked_ms / 1000 / steps if steps else 0.0,
        failures=History(sum(one not in _NO_LOSS for one in causes), seen_seconds),
        host_losses=History(sum(one in _HOST_LOST for one in causes), seen_seconds),
    )


def plan_tiers(known: Known, mtbf_seconds: float | None, asked_seconds: float) -> list[TierPlan]:
    """Return how often each tier should take a save; nothing where no save was measured.

    Args:
        known: of the run.
        mtbf_seconds: M as somebody said it, for both tiers; None takes what was seen.
        asked_seconds: an interval to say the cost of as well; 0 for none.
    """
    plans = []
    if known.stalling.p50 is not None:
        land_seconds = known.saving.p95 or 0.0
        mtbf = mtbf_seconds or known.failures.mtbf_seconds()
        interval = choose_interval(known.stalling.p50, mtbf, Bounds(land_seconds=land_seconds))
        plans.append(_tier("saves", interval, land_seconds, asked_seconds))
    if known.promoting.p50 is not None:
        mtbf = mtbf_seconds or known.host_losses.mtbf_seconds()
        bounds = Bounds(PROMOTING_SHARE_MAX, land_seconds=known.promoting.p95 or 0.0)
        interval = choose_interval(known.promoting.p50, mtbf, bounds)
        plans.append(_tier("durable", interval, bounds.land_seconds, 0.0))
    return plans


def stop_seconds(known: Known) -> float | None:
    """Return what a notice must leave: to end the step, to save it, and a margin; None unknown.

    With a near tier the save goes on to the durable one.
    """
    if known.saving.p95 is None:
        return None
    return known.step_seconds + known.saving.p95 + (known.promoting.p95 or 0.0) + MARGIN_SECONDS


def _tier(tier: str, interval: Interval, land_seconds: float, asked_seconds: float) -> TierPlan:
    best = interval.seconds
    seconds = {"half": best / 2, "best": best, "double": best * 2}
    seconds |= {"asked": asked_seconds} if asked_seconds else {}
    expected = {
        name: expect(one, interval.cost_seconds, interval.mtbf_seconds, land_seconds)
        for name, one in seconds.items()
    }
    return TierPlan(tier, interval, seconds, expected)
