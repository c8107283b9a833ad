"""Best save interval from a run's measured costs, and parser of the option ``--every``.

All functions are pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from resilient.errors import ConfigError
from resilient.goodput.timeline import TimeClass
from resilient.save_interval import (
    PROMOTING_SHARE_MAX,
    FailureObservations,
    IntervalBounds,
    IntervalEstimate,
    choose_interval,
    expect,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.goodput.event_log import EventRecord
    from resilient.goodput.report import GoodputReport
    from resilient.save_interval import SaveInterval

MARGIN_SECONDS = 3.0
"""Margin that the agent reserves before a deadline, and that is added to the p95 of a save."""
_NO_LOSS = frozenset({"preemption", "resize"})
_HOST_LOST = frozenset({"agent_lost", "host_lost", "rendezvous_lost"})
_MEDIAN, _P95 = 0.5, 0.95


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of an operation, in seconds; None if nothing was measured."""

    count: int
    p50: float | None
    p95: float | None

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        """Return the nearest-rank percentiles."""
        if not seconds:
            return Times(0, None, None)
        ordered = sorted(seconds)
        p50, p95 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (_MEDIAN, _P95))
        return Times(len(ordered), p50, p95)


@dataclass(frozen=True, slots=True)
class SaveCosts:
    """Measured costs of saves and rates of failures: the input of a plan.

    Attributes:
        saving: Time from capture to manifest.
        stalling: Time in which training waited for a save.
        promoting: Time of a promotion from the near tier to the durable tier.
        step_seconds: Time of a step; 0 if no step was seen.
        failures: Failures of any kind, with the observed time.
        host_losses: Losses of whole hosts, with the observed time.
    """

    saving: Times
    stalling: Times
    promoting: Times
    step_seconds: float
    failures: FailureObservations
    host_losses: FailureObservations


@dataclass(frozen=True, slots=True)
class TierPlan:
    """Save interval of one tier.

    Attributes:
        tier: ``saves``, or ``durable`` for the promotions of a near tier.
        interval: The best interval within its bounds.
        expected: Expected cost of each interval, by name: ``half``, ``best``, ``double``,
            ``asked``.
        seconds: The intervals themselves, by the same names.
    """

    tier: str
    interval: SaveInterval
    seconds: dict[str, float]
    expected: dict[str, IntervalEstimate]


def measure_save_costs(report: GoodputReport, records: Sequence[EventRecord]) -> SaveCosts:
    """Return the costs of saves and the rates of failures from the events of a run."""
    spent = report.spent_ms
    worked_ms = spent[TimeClass.TRAINING] + spent[TimeClass.LOST]
    steps = report.now.step + report.lost_steps
    seen_seconds = (report.wall_ms - spent[TimeClass.DOWN]) / 1000
    causes = [fault.cause for fault in report.faults]
    promoted = [record for record in records if record.event == "CheckpointPromoted"]
    return SaveCosts(
        saving=Times.of([save.commit_ms / 1000 for save in report.saved]),
        stalling=Times.of([save.stall_ms / 1000 for save in report.saved]),
        promoting=Times.of([record.number("took_seconds") for record in promoted]),
        step_seconds=worked_ms / 1000 / steps if steps else 0.0,
        failures=FailureObservations(sum(cause not in _NO_LOSS for cause in causes), seen_seconds),
        host_losses=FailureObservations(sum(cause in _HOST_LOST for cause in causes), seen_seconds),
    )


def plan_tiers(
    costs: SaveCosts, mtbf_seconds: float | None, asked_seconds: float
) -> list[TierPlan]:
    """Return the best save interval of each tier; empty if no save was measured.

    Args:
        costs: Measured costs of the run.
        mtbf_seconds: Mean time between failures from the user, for both tiers; None uses the
            observed one.
        asked_seconds: Another interval to estimate; 0 for none.
    """
    plans = []
    if costs.stalling.p50 is not None:
        land_seconds = costs.saving.p95 or 0.0
        mtbf = mtbf_seconds or costs.failures.mtbf_seconds()
        interval = choose_interval(
            costs.stalling.p50, mtbf, IntervalBounds(land_seconds=land_seconds)
        )
        plans.append(_tier("saves", interval, land_seconds, asked_seconds))
    if costs.promoting.p50 is not None:
        mtbf = mtbf_seconds or costs.host_losses.mtbf_seconds()
        bounds = IntervalBounds(PROMOTING_SHARE_MAX, land_seconds=costs.promoting.p95 or 0.0)
        interval = choose_interval(costs.promoting.p50, mtbf, bounds)
        plans.append(_tier("durable", interval, bounds.land_seconds, 0.0))
    return plans


def stop_seconds(costs: SaveCosts) -> float | None:
    """Return the notice time that a preemption needs, in seconds; None if unknown.

    The time covers the current step, its save and a margin. With a near tier it includes the
    promotion to the durable tier.
    """
    if costs.saving.p95 is None:
        return None
    return costs.step_seconds + costs.saving.p95 + (costs.promoting.p95 or 0.0) + MARGIN_SECONDS


def _tier(tier: str, interval: SaveInterval, land_seconds: float, asked_seconds: float) -> TierPlan:
    best = interval.seconds
    seconds = {"half": best / 2, "best": best, "double": best * 2}
    seconds |= {"asked": asked_seconds} if asked_seconds else {}
    expected = {
        name: expect(second, interval.cost_seconds, interval.mtbf_seconds, land_seconds)
        for name, second in seconds.items()
    }
    return TierPlan(tier, interval, seconds, expected)


_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|min|h)")
_STEPS = re.compile(r"(\d+) ?steps?")
_MEMORY = "memory="
_ACCEPTED = "use 500steps, 30s, 5m, 1h or auto, and with it or alone memory=1step"


@dataclass(frozen=True, slots=True)
class SaveEvery:
    """Save interval in steps or in seconds, or an automatic interval from the cost of saves.

    Attributes:
        steps: Steps between saves; 0 if not given in steps.
        seconds: Training time between saves, in seconds; 0 if not given in time.
        memory_steps: Steps between two entries of the step cache; 0 for none.
        says_saves: Whether the text sets the save interval, and not only the interval of the step
            cache.
    """

    steps: int = 0
    seconds: float = 0.0
    memory_steps: int = 0
    says_saves: bool = True

    @property
    def is_auto(self) -> bool:
        """True if the interval follows from the cost of saves and the rate of failures."""
        return self.says_saves and not self.steps and not self.seconds


# Training calls this function at each step.
@lru_cache
def parse_every(text: str, where: str) -> SaveEvery:
    """Parse a save interval: ``500steps``, ``30s``, ``5m``, ``1h`` or ``auto``.

    ``memory=1step``, alone or after a comma, sets the interval of the step cache.

    Args:
        text: Text in any case.
        where: Name of the option or argument, for an error.

    Raises:
        ConfigError: The text matches none of the forms, or a number is 0.
    """
    words = [word.strip() for word in text.lower().split(",")]
    sizes = [word.removeprefix(_MEMORY) for word in words if word.startswith(_MEMORY)]
    saves = [word for word in words if not word.startswith(_MEMORY)]
    if len(sizes) > 1 or len(saves) > 1:
        raise _refuse(text, where)
    schedule = _parse_interval(saves[0]) if saves else SaveEvery(says_saves=False)
    memory = _parse_interval(sizes[0]) if sizes else SaveEvery()
    if schedule is None or memory is None or (sizes and not memory.steps):
        raise _refuse(text, where)
    return replace(schedule, memory_steps=memory.steps)


def _parse_interval(word: str) -> SaveEvery | None:
    if word == "auto":
        return SaveEvery()
    if (match := _STEPS.fullmatch(word)) and int(match[1]) > 0:
        return SaveEvery(steps=int(match[1]))
    if (match := _TIME.fullmatch(word)) and float(match[1]) > 0:
        return SaveEvery(seconds=float(match[1]) * _UNITS[match[2]])
    return None


def _refuse(text: str, where: str) -> ConfigError:
    return ConfigError(f"{where} {text!r} is not accepted: {_ACCEPTED}")
