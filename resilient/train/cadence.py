"""At which step the next save takes place: from what ranks have measured (pure).

Nobody waits for anybody at a step. The ranks agree on the number of the step when there is
something new to plan from, once for each save, and until then each only counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from resilient.interval import Bounds, Interval, choose_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.accounting.every import Every

UNMEASURED_SECONDS = 60.0
"""When the first save of a life is made whose cost nobody knows yet."""
_RECENT_STEPS = 256
_STEPS_AFTER_SAVE = 4096
_COSTS = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank knows when the next save is planned.

    Attributes:
        step_seconds: a step takes, without evaluations and saves.
        cost_seconds: a save costs training; None before the first.
        land_seconds: a save takes until it is whole (p95); None before that is known.
    """

    step_seconds: float
    cost_seconds: float | None = None
    land_seconds: float | None = None

    def to_json(self) -> list[float | None]:
        """Return a JSON-able value; its items are what a Measured is made of."""
        return [self.step_seconds, self.cost_seconds, self.land_seconds]


@dataclass(frozen=True, slots=True)
class Planned:
    """When the next save is, and why.

    Attributes:
        steps: from the last save, or from where the life began, to the next; at least 1.
        seconds: of training that these are meant to be.
        step_seconds: of the slowest rank.
        chosen: how the seconds were chosen; None where somebody said them, or nothing is known.
    """

    steps: int
    seconds: float
    step_seconds: float
    chosen: Interval | None = None


def plan(every: Every, shown: Sequence[Measured], mtbf_seconds: float) -> Planned:
    """Return when the next save is, for all ranks: the slowest of them decides.

    Args:
        every: as the user said it, in seconds or ``auto``.
        shown: what each rank has measured.
        mtbf_seconds: M, for ``auto``.
    """
    step_seconds = max(one.step_seconds for one in shown)
    chosen, seconds = None, every.seconds
    if every.is_auto:
        costs = [one.cost_seconds for one in shown if one.cost_seconds is not None]
        lands = [one.land_seconds for one in shown if one.land_seconds is not None]
        bounds = Bounds(land_seconds=max(lands, default=0.0))
        chosen = choose_interval(max(costs), mtbf_seconds, bounds) if costs else None
        seconds = chosen.seconds if chosen else UNMEASURED_SECONDS
    steps = max(1, round(seconds / step_seconds)) if step_seconds > 0 else 1
    return Planned(steps, seconds, step_seconds, chosen)


def is_told(before: float | None, after: float) -> bool:
    """Say whether an interval differs by more than a quarter from the one that was told last."""
    return before is None or abs(after - before) > before / 4


class StepTimes:
    """What steps take, without what is no step, and what saves cost.

    Time is handed in, in seconds, together with how long training has waited for saves so far.
    The first step of a life is left out: it compiles, connects and gets memory.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._slowed: deque[float] = deque(maxlen=_COSTS)
        self._after_save: deque[float] = deque(maxlen=_STEPS_AFTER_SAVE)
        self._since: tuple[float, float] | None = None
        self._is_first = True
        self._stalled_seconds = 0.0

    def begin(self, now_seconds: float, stalled_seconds: float) -> None:
        """Note that a step begins; what came between it and the last one counts if it was short.

        What is asked of a device is done later, so the end of the last step is the better mark.
        """
        if self._since is None:
            self._since = (now_seconds, stalled_seconds)

    def end(self, now_seconds: float, stalled_seconds: float) -> None:
        """Note that a step has ended."""
        since, self._since = self._since, (now_seconds, stalled_seconds)
        if self._is_first or since is None:
            self._is_first = False
            return
        took_seconds = now_seconds - since[0] - (stalled_seconds - since[1])
        self._recent.append(max(0.0, took_seconds))
        if len(self._after_save) < _STEPS_AFTER_SAVE:
            self._after_save.append(max(0.0, took_seconds))

    def disturb(self) -> None:
        """Note that something else than a step was done since the last one."""
        self._since = None

    def save(self, land_seconds: float | None) -> None:
        """Note that a save was begun.

        Args:
            land_seconds: what the save before took until it was whole; None if there was none.
        """
        self.disturb()
        if land_seconds is not None:
            self._slowed.append(slowed_seconds(self._after_save, land_seconds))
        self._after_save.clear()

    def settle(self, stalled_seconds: float) -> None:
        """Note how long training has waited for saves until the last one was copied."""
        self._costs.append(max(0.0, stalled_seconds - self._stalled_seconds))
        self._stalled_seconds = stalled_seconds

    def measured(self, land_seconds: float | None) -> Measured | None:
        """Return what is known, None while no step was measured.

        Args:
            land_seconds: what saves take until they are whole; None if that is not known.
        """
        if not self._recent:
            return None
        slowed = median(self._slowed) if self._slowed else 0.0
        cost = median(self._costs) + slowed if self._costs else None
        return Measured(fmean(self._recent), cost, land_seconds)


def slowed_seconds(steps: Sequence[float], land_seconds: float) -> float:
    """Return how much longer steps took beside a save that was on its way than after it.

    Args:
        steps: what each took since the save, in order.
        land_seconds: what the save took until it was whole.
    """
    beside, passed_seconds = 0, 0.0
    for one in steps:
        if passed_seconds >= land_seconds:
            break
        passed_seconds += one
        beside += 1
    taken = list(steps)
    if not taken[:beside] or not taken[beside:]:
        return 0.0
    return beside * max(0.0, median(taken[:beside]) - median(taken[beside:]))
