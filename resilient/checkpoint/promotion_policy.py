"""Promotion policy: schedule of copies from the near tier (fast local store) to the durable tier.

The interval between two copies is configured, or planned from the cost of a copy and the rate of
lost hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any

from resilient.checkpoint import events
from resilient.checkpoint.generations import list_numbers, read_generation
from resilient.errors import ConfigError, IntegrityError, KeyNotFound, ResilientError
from resilient.save_interval import (
    HOST_LOSSES,
    FailureObservations,
    IntervalBounds,
    choose_interval,
    observe,
)
from resilient.save_interval import PROMOTING_SHARE_MAX as SHARE_MAX

if TYPE_CHECKING:
    from resilient.checkpoint.context import CheckpointContext
    from resilient.save_interval import SaveInterval
    from resilient.storage.store import Store

_GENERATIONS_MAX = 100
_RECENT_PROMOTIONS = 64
_P95 = 0.95


@dataclass(frozen=True, slots=True)
class TieringOptions:
    """Options of a near tier.

    Attributes:
        durable_every: Promote every N-th save. None: every save, or by ``durable_every_seconds``.
        near_total_limit: Number of checkpoints that the near tier keeps.
        durable_every_seconds: Longest time without a promotion, after which the next save is
            promoted; None for no limit.
        is_planned: Derive the interval from the cost of promotions and the rate of lost hosts; the
            other two intervals are ignored.

    Raises:
        ConfigError: A value is not accepted.
    """

    durable_every: int | None = None
    near_total_limit: int = 2
    durable_every_seconds: float | None = None
    is_planned: bool = False

    def __post_init__(self) -> None:
        for name in ("durable_every", "near_total_limit"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"`{name}`={value!r} is not accepted: use at least 1")
        seconds = self.durable_every_seconds
        if seconds is not None and not (type(seconds) in (int, float) and seconds > 0):
            raise ConfigError(
                f"`durable_every_seconds`={seconds!r} is not accepted: use more than 0"
            )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value with the constructor's arguments."""
        return asdict(self)

    def is_due(self, saves: int, passed_seconds: float) -> bool:
        """Return whether a save is due for promotion by the schedule.

        Args:
            saves: Number of the save, from 1.
            passed_seconds: Time since the commit of the last promoted save.
        """
        seconds = self.durable_every_seconds
        if seconds is not None and passed_seconds >= seconds:
            return True
        interval = self.durable_every or (1 if seconds is None else 0)
        return interval > 0 and saves % interval == 0


def parse_tiering(options: TieringOptions | Mapping[str, Any] | None) -> TieringOptions:
    """Return the tiering options of a configuration; None means the default.

    Raises:
        ConfigError: A name is unknown, a value is not accepted, or the type is not a mapping.
    """
    if options is None or isinstance(options, TieringOptions):
        return options or TieringOptions()
    names = [field.name for field in fields(TieringOptions)]
    if not isinstance(options, Mapping):
        raise ConfigError(f"`tiering`={options!r} is not accepted: use a mapping of {names}")
    for name in options:
        if name not in names:
            raise ConfigError(f"tiering has no option `{name}`: use one of {', '.join(names)}")
    return TieringOptions(**options)


class PromotionSchedule:
    """Plan of the promotion interval, renewed before each save from the measurements so far.

    C is the duration of a promotion. M is the mean time between losses of hosts, each with its near
    tier. Training does not wait for promotions, so they may take half of the time. The next
    promotion does not begin before the previous one is done. The plan is not saved.
    """

    def __init__(self) -> None:
        self._took_seconds: list[float] = []
        self._history = FailureObservations()
        self._began_seconds = 0.0
        self._reported_seconds = 0.0

    def begin(self, context: CheckpointContext) -> None:
        """Read the losses of hosts from the generation records; if the store fails, assume none.

        Crash: reads only.
        """
        self._began_seconds = context.clock.monotonic_seconds()
        try:
            self._history = observe(_causes_and_times(context.store), HOST_LOSSES)
        except ResilientError:
            self._history = FailureObservations()

    def note(self, took_seconds: float) -> None:
        """Record the duration of a promotion."""
        self._took_seconds.append(took_seconds)

    def plan(self, context: CheckpointContext) -> TieringOptions:
        """Return the current schedule; emit an event if it changed by more than a quarter.

        Until a promotion was measured, every save is promoted.
        """
        schedule = self.chosen(context.clock.monotonic_seconds())
        if schedule is None:
            return TieringOptions()
        if abs(schedule.seconds - self._reported_seconds) > self._reported_seconds / 4:
            self._reported_seconds = schedule.seconds
            context.emit_once(
                events.PromotionScheduleChosen(
                    schedule.seconds,
                    schedule.cost_seconds,
                    schedule.mtbf_seconds,
                    self._history.failures,
                    schedule.bound,
                )
            )
        return TieringOptions(durable_every_seconds=schedule.seconds)

    def chosen(self, now_seconds: float) -> SaveInterval | None:
        """Return the best interval within bounds; None before the first measurement."""
        durations_seconds = sorted(self._took_seconds[-_RECENT_PROMOTIONS:])
        if not durations_seconds:
            return None
        mtbf_seconds = self._history.mtbf_seconds(now_seconds - self._began_seconds)
        land_seconds = durations_seconds[
            min(int(_P95 * len(durations_seconds)), len(durations_seconds) - 1)
        ]
        bounds = IntervalBounds(SHARE_MAX, land_seconds=land_seconds)
        return choose_interval(median(durations_seconds), mtbf_seconds, bounds)


def _causes_and_times(store: Store) -> list[tuple[str, str]]:
    """Return cause and claim time of the newest generations, as far as they can be read."""
    generations = []
    for number in list_numbers(store)[-_GENERATIONS_MAX:]:
        try:
            record = read_generation(store, number)
        except (IntegrityError, KeyNotFound):
            continue
        generations.append((record.cause, record.claimed_at))
    return generations
