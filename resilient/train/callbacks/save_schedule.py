"""Save schedule by time or by the cost of a save: measurements, planning and the callback.

The schedule does not make ranks wait for each other at every step. The ranks agree on the step of
the next save only once per save, when new measurements exist. Until this step, the ranks only count
steps.

All ranks make the agreement at the end of the same step. After a stop request, all ranks finish the
last step that any rank has begun. No rank therefore stops before an agreement that another rank
waits for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.generations import list_numbers, read_generation
from resilient.distributed.coordination import agree
from resilient.errors import ResilientError
from resilient.events import Event
from resilient.goodput.save_planning import SaveEvery, parse_every
from resilient.save_interval import (
    FailureObservations,
    IntervalBounds,
    SaveInterval,
    choose_interval,
    observe,
)
from resilient.storage.open import open_store
from resilient.train.arguments.derived import is_planned
from resilient.train.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.distributed.coordination import ControlGroup
    from resilient.train.session import Session

UNMEASURED_SECONDS = 60.0
"""Interval before the first save of an attempt, while the cost of a save is unknown."""
_RECENT_STEPS = 256
_STEPS_AFTER_SAVE = 4096
_COSTS = 64


@dataclass(frozen=True, slots=True)
class SaveMeasurements:
    """Measurements of one rank when the next save is planned.

    Attributes:
        step_seconds: Duration of a step, without evaluations and saves.
        cost_seconds: Training time lost to a save; None before the first save.
        commit_seconds: Time until a save is committed (p95); None while unknown.
    """

    step_seconds: float
    cost_seconds: float | None = None
    commit_seconds: float | None = None

    def to_json(self) -> list[float | None]:
        """Return a JSON value: the constructor arguments in order."""
        return [self.step_seconds, self.cost_seconds, self.commit_seconds]


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """Step of the next save and the reason.

    Attributes:
        steps: Steps to the next save, from the last save or the attempt's start; at least 1.
        seconds: Training time that these steps should take.
        step_seconds: Step duration of the slowest rank.
        chosen: Choice of the interval; None if the user gave the interval or nothing was measured.
    """

    steps: int
    seconds: float
    step_seconds: float
    chosen: SaveInterval | None = None


def plan(
    schedule: SaveEvery, shown: Sequence[SaveMeasurements], mtbf_seconds: float
) -> SaveDecision:
    """Return the next save for all ranks; the slowest rank decides.

    Args:
        schedule: User's setting, in seconds or ``auto``.
        shown: Measurements of each rank.
        mtbf_seconds: M, the mean time between failures, for ``auto``.
    """
    step_seconds = max(measurements.step_seconds for measurements in shown)
    interval, seconds = None, schedule.seconds
    if schedule.is_auto:
        costs = [
            measurements.cost_seconds
            for measurements in shown
            if measurements.cost_seconds is not None
        ]
        commit_times_seconds = [
            measurements.commit_seconds
            for measurements in shown
            if measurements.commit_seconds is not None
        ]
        bounds = IntervalBounds(land_seconds=max(commit_times_seconds, default=0.0))
        interval = choose_interval(max(costs), mtbf_seconds, bounds) if costs else None
        seconds = interval.seconds if interval else UNMEASURED_SECONDS
    steps = max(1, round(seconds / step_seconds)) if step_seconds > 0 else 1
    return SaveDecision(steps, seconds, step_seconds, interval)


def needs_report(before: float | None, after: float) -> bool:
    """Return whether an interval differs by more than a quarter from the last reported interval."""
    return before is None or abs(after - before) > before / 4


class StepTimes:
    """Measured durations of steps, without other work, and costs of saves.

    Callers pass the time and the total time that training has waited for saves, in seconds. The
    first
    step of an attempt is left out, because this step compiles, connects and allocates memory.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._slow_times: deque[float] = deque(maxlen=_COSTS)
        self._after_save: deque[float] = deque(maxlen=_STEPS_AFTER_SAVE)
        self._start: tuple[float, float] | None = None
        self._is_first = True
        self._waited_seconds = 0.0

    def begin(self, now_seconds: float, waited_seconds: float) -> None:
        """Record the start of a step; a short gap since the last step counts as part of the step.

        A device executes asynchronously, so the end of the last step is a more accurate start
        time.
        """
        if self._start is None:
            self._start = (now_seconds, waited_seconds)

    def end(self, now_seconds: float, waited_seconds: float) -> None:
        """Record the end of a step."""
        step_start, self._start = self._start, (now_seconds, waited_seconds)
        if self._is_first or step_start is None:
            self._is_first = False
            return
        took_seconds = now_seconds - step_start[0] - (waited_seconds - step_start[1])
        self._recent.append(max(0.0, took_seconds))
        if len(self._after_save) < _STEPS_AFTER_SAVE:
            self._after_save.append(max(0.0, took_seconds))

    def note_other_work(self) -> None:
        """Record that other work followed the last step."""
        self._start = None

    def save(self, commit_seconds: float | None) -> None:
        """Record the start of a save.

        Args:
            commit_seconds: Time until the previous save was committed; None if there was none.
        """
        self.note_other_work()
        if commit_seconds is not None:
            self._slow_times.append(slowed_seconds(self._after_save, commit_seconds))
        self._after_save.clear()

    def record_waits(self, waited_seconds: float) -> None:
        """Record the total time that training waited for saves, up to the last copy."""
        self._costs.append(max(0.0, waited_seconds - self._waited_seconds))
        self._waited_seconds = waited_seconds

    def measured(self, commit_seconds: float | None) -> SaveMeasurements | None:
        """Return this rank's measurements; None while no step was measured.

        Args:
            commit_seconds: Time until a save is committed; None if unknown.
        """
        if not self._recent:
            return None
        slowed = median(self._slow_times) if self._slow_times else 0.0
        cost = median(self._costs) + slowed if self._costs else None
        return SaveMeasurements(fmean(self._recent), cost, commit_seconds)


def slowed_seconds(steps: Sequence[float], commit_seconds: float) -> float:
    """Return the extra time of steps that ran during a save, relative to the steps after it.

    Args:
        steps: Durations of the steps since the save, in order.
        commit_seconds: Time until the save was committed.
    """
    overlapping_steps, passed_seconds = 0, 0.0
    for step in steps:
        if passed_seconds >= commit_seconds:
            break
        passed_seconds += step
        overlapping_steps += 1
    step_seconds = list(steps)
    if not step_seconds[:overlapping_steps] or not step_seconds[overlapping_steps:]:
        return 0.0
    return overlapping_steps * max(
        0.0, median(step_seconds[:overlapping_steps]) - median(step_seconds[overlapping_steps:])
    )


_FIRST_STEPS = 4
_LIVES_MAX = 100


@dataclass(frozen=True, slots=True)
class SaveScheduleChosen(Event):
    """The save interval was chosen, or changed by more than a quarter.

    Attributes:
        next_step: Step of the next save.
        interval_seconds: Training time from one save to the next.
        step_seconds: Step duration of the slowest rank.
        cost_seconds: C, the training time lost to a save; None if the user gave the interval,
            or before the first measurement.
        mtbf_seconds: M, the mean time between failures; None in the same cases.
        failures: Recorded failures from which M is computed.
        bound: Bound that limits the interval, if it differs from the optimum; empty for none.
    """

    global_step: int
    next_step: int
    interval_seconds: float
    step_seconds: float
    cost_seconds: float | None
    mtbf_seconds: float | None
    failures: int
    bound: str

    @staticmethod
    def of(planned: SaveDecision, step: int, next_step: int, failures: int) -> SaveScheduleChosen:
        """Return the event for a decision that applies from ``step`` on."""
        interval = planned.chosen
        cost, mtbf = (interval.cost_seconds, interval.mtbf_seconds) if interval else (None, None)
        bound = interval.bound if interval else ""
        seconds, step_seconds = planned.seconds, planned.step_seconds
        return SaveScheduleChosen(
            step, next_step, seconds, step_seconds, cost, mtbf, failures, bound
        )

    def message(self) -> str:
        """Format the interval and its reason."""
        reason = "as requested, or until the first save is measured"
        if self.cost_seconds is not None and self.mtbf_seconds is not None:
            reason = f"a save costs {self.cost_seconds:.3g} s, {self.failures} failures: one in"
            reason += f" {self.mtbf_seconds / 3600:.3g} h" + _BOUNDS[self.bound]
        return (
            f"saving every {self.interval_seconds:.3g} s of steps of {self.step_seconds:.3g} s, "
            f"next after step {self.next_step}: {reason}"
        )


_BOUNDS = {
    "": "",
    "overhead": "; limited, so that saves take at most 5 % of the time",
    "landing": "; limited by the time until a save is committed",
    "longest": "; limited to one hour",
}


@dataclass(slots=True)
class _AttemptSchedule:
    """State of the save schedule in one call of ``train``.

    Attributes:
        since: Step of the last save, or the step from which the attempt began.
        plans_at: Step after which the next save is planned.
        due: Step of the next save; None until it is planned.
        waits_for_copy: Whether training may still wait for the copy of the last save.
    """

    every: SaveEvery
    comms: ControlGroup
    history: FailureObservations
    began_seconds: float
    since: int
    plans_at: int
    due: int | None = None
    waits_for_copy: bool = False
    reported_seconds: float | None = None
    agreements: int = 0
    steps: StepTimes = field(default_factory=StepTimes)


class CadenceCallback(TrainerCallback):
    """Callback that requests saves every ``save_every`` seconds, or at the optimal interval.

    The schedule is planned after the first measured steps of an attempt. The schedule is planned
    again at the end of the step after each save, when training has waited for the complete copy.
    The plan uses the step time of the slowest rank and rank 0's record of failures. The plan is not
    saved. A resumed attempt plans again, and the choice of saved steps does not affect training.

    Args:
        session: Ranks, clock and repository.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._attempt: _AttemptSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Read the run's failure history."""
        session, step = self._session, state.global_step
        schedule = parse_every(args.save_every, "`save_every`")
        knows = schedule.is_auto and session.world.is_coordinator
        self._attempt = _AttemptSchedule(
            every=schedule,
            comms=session.comms(f"cadence/{session.next_topic()}"),
            history=history_of(session) if knows else FailureObservations(),
            began_seconds=session.clock.monotonic_seconds(),
            since=step,
            plans_at=step + _FIRST_STEPS,
        )

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Record the start of a step."""
        if self._attempt is not None:
            now_seconds = self._session.clock.monotonic_seconds()
            self._attempt.steps.begin(now_seconds, kwargs["save_timings"].waited_seconds)

    def on_step_end(self, _args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
        """Record the end of a step, plan from new measurements, and request a save that is due."""
        attempt, step, save_timings = self._attempt, state.global_step, kwargs["save_timings"]
        if attempt is None:
            return
        attempt.steps.end(self._session.clock.monotonic_seconds(), save_timings.waited_seconds)
        if attempt.waits_for_copy:
            attempt.steps.record_waits(save_timings.waited_seconds)
            attempt.waits_for_copy = False
        if attempt.due is None and step >= attempt.plans_at:
            measured = attempt.steps.measured(save_timings.commit_p95)
            if measured is not None:
                self._plan(attempt, measured, step, kwargs["emit"])
            attempt.steps.note_other_work()
        if attempt.due is not None and step >= attempt.due:
            control.should_save = True

    def on_save(self, _args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Start the next interval at this save, also if another callback requested the save."""
        attempt = self._attempt
        if attempt is not None:
            attempt.steps.save(kwargs["save_timings"].last_save_seconds)
            step = state.global_step
            attempt.since, attempt.plans_at, attempt.due = step, step + 1, None
            attempt.waits_for_copy = True

    def on_evaluate(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Leave the time of an evaluation out of the measurements."""
        if self._attempt is not None:
            self._attempt.steps.note_other_work()

    def on_epoch_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Leave the time between two epochs out of the measurements."""
        if self._attempt is not None:
            self._attempt.steps.note_other_work()

    def close(self) -> None:
        """Close the connection."""
        if self._attempt is not None:
            self._attempt.comms.close()
            self._attempt = None

    def _plan(
        self, attempt: _AttemptSchedule, measured: SaveMeasurements, step: int, emit: Any
    ) -> None:
        """Agree on the step of the next save. Collective."""
        decisions: list[SaveDecision] = []

        def rule(answers: list[Any]) -> int:
            attempt_seconds = self._session.clock.monotonic_seconds() - attempt.began_seconds
            mtbf_seconds = attempt.history.mtbf_seconds(attempt_seconds)
            decisions.append(
                plan(attempt.every, [SaveMeasurements(*answer) for answer in answers], mtbf_seconds)
            )
            return decisions[0].steps

        attempt.agreements += 1
        topic, within_seconds = str(attempt.agreements), self._session.args.save_within_seconds
        steps: int = agree(attempt.comms, topic, measured.to_json(), rule, within_seconds)
        attempt.due = attempt.since + steps
        if decisions and needs_report(attempt.reported_seconds, decisions[0].seconds):
            attempt.reported_seconds = decisions[0].seconds
            next_step = max(step, attempt.due)
            emit(SaveScheduleChosen.of(decisions[0], step, next_step, attempt.history.failures))


def cadence_callbacks(session: Session) -> list[CadenceCallback]:
    """Return the callback for time-based saves, if the arguments request them."""
    return [CadenceCallback(session)] if is_planned(session.args) else []


def history_of(session: Session) -> FailureObservations:
    """Return the failures of this run, from its newest recorded attempts.

    If the store does not answer, the history is empty, because training must not stop.
    """
    launch, args = session.rank_group.launch, session.args
    options = {**(args.storage_options or {}), **launch.storage_options}
    attempts = []
    try:
        store = open_store(session.repository, storage_options=options)
        for number in list_numbers(store)[-_LIVES_MAX:]:
            record = read_generation(store, number)
            attempts.append((record.cause, record.claimed_at))
    except ResilientError:
        return FailureObservations()
    return observe(attempts)
