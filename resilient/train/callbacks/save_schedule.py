"""Time-based and adaptive saves.

At which step the next save takes place: from what ranks have measured (pure).

Nobody waits for anybody at a step. The ranks agree on the number of the step when there is
something new to plan from, once for each save, and until then each only counts.

Saves by time, or by what they cost: measures steps and saves, and agrees on the next one.

All ranks come to each agreement at the end of the same step, which every one of them has begun: a
stop that is asked for meanwhile waits for no answer of a rank that is not coming.
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
"""When the first save of a life is made whose cost nobody knows yet."""
_RECENT_STEPS = 256
_STEPS_AFTER_SAVE = 4096
_COSTS = 64


@dataclass(frozen=True, slots=True)
class SaveMeasurements:
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
class SaveDecision:
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
    chosen: SaveInterval | None = None


def plan(every: SaveEvery, shown: Sequence[SaveMeasurements], mtbf_seconds: float) -> SaveDecision:
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
        bounds = IntervalBounds(land_seconds=max(lands, default=0.0))
        chosen = choose_interval(max(costs), mtbf_seconds, bounds) if costs else None
        seconds = chosen.seconds if chosen else UNMEASURED_SECONDS
    steps = max(1, round(seconds / step_seconds)) if step_seconds > 0 else 1
    return SaveDecision(steps, seconds, step_seconds, chosen)


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

    def measured(self, land_seconds: float | None) -> SaveMeasurements | None:
        """Return what is known, None while no step was measured.

        Args:
            land_seconds: what saves take until they are whole; None if that is not known.
        """
        if not self._recent:
            return None
        slowed = median(self._slowed) if self._slowed else 0.0
        cost = median(self._costs) + slowed if self._costs else None
        return SaveMeasurements(fmean(self._recent), cost, land_seconds)


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


_FIRST_STEPS = 4
_LIVES_MAX = 100


@dataclass(frozen=True, slots=True)
class SaveScheduleChosen(Event):
    """The interval between saves is chosen, or is another by more than a quarter.

    Attributes:
        next_step: that is saved.
        interval_seconds: of training, from one save to the next.
        step_seconds: of the slowest rank.
        cost_seconds: C, what a save costs training; None where the user said the interval, or
            none was measured yet.
        mtbf_seconds: M, the mean time between failures; None likewise.
        failures: that are on record, which M is from.
        bound: what keeps the interval from the best one; empty if nothing does.
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
        """Return the fact that ``planned`` holds from ``step`` on."""
        chosen = planned.chosen
        cost, mtbf = (chosen.cost_seconds, chosen.mtbf_seconds) if chosen else (None, None)
        bound = chosen.bound if chosen else ""
        seconds, step_seconds = planned.seconds, planned.step_seconds
        return SaveScheduleChosen(
            step, next_step, seconds, step_seconds, cost, mtbf, failures, bound
        )

    def line(self) -> str:
        """Say the interval and why it is that."""
        why = "as asked for, or until the first save is measured"
        if self.cost_seconds is not None and self.mtbf_seconds is not None:
            why = f"a save costs {self.cost_seconds:.3g} s, {self.failures} failures: one in"
            why += f" {self.mtbf_seconds / 3600:.3g} h" + _BOUNDS[self.bound]
        return (
            f"saving every {self.interval_seconds:.3g} s of steps of {self.step_seconds:.3g} s, "
            f"next after step {self.next_step}: {why}"
        )


_BOUNDS = {
    "": "",
    "overhead": "; bounded, so that saves take 5 % of the time at most",
    "landing": "; bounded by what a save takes to be whole",
    "longest": "; bounded by an hour",
}


@dataclass(slots=True)
class _Life:
    """What is known in one training.

    Attributes:
        since: the step of the last save, or that the life began from.
        plans_at: the step at whose end the next save is planned.
        due: the step of the next save; None until it is planned.
        is_owing: whether training may still wait for the copy of the last save.
    """

    every: SaveEvery
    comms: ControlGroup
    history: FailureObservations
    began_seconds: float
    since: int
    plans_at: int
    due: int | None = None
    is_owing: bool = False
    told_seconds: float | None = None
    agreements: int = 0
    steps: StepTimes = field(default_factory=StepTimes)


class CadenceCallback(TrainerCallback):
    """Asks for a save when ``save_every`` seconds of training have passed, or when it pays.

    It plans when the first steps of a life are measured, and at the end of the step after each
    save: then training has waited for all of its copy. The steps of the slowest rank count, and
    the time between failures that rank zero knows. What is planned is not saved: a life that goes
    on plans anew, and which steps are saved changes no bit of training.

    Args:
        session: the ranks, the clock, the repository.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._life: _Life | None = None

    def on_train_begin(self, args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Look into the history of the run."""
        session, step = self._session, state.global_step
        every = parse_every(args.save_every, "`save_every`")
        knows = every.is_auto and session.world.is_coordinator
        self._life = _Life(
            every=every,
            comms=session.comms(f"cadence/{session.next_topic()}"),
            history=history_of(session) if knows else FailureObservations(),
            began_seconds=session.clock.monotonic_seconds(),
            since=step,
            plans_at=step + _FIRST_STEPS,
        )

    def on_step_begin(self, _args: Any, _state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Note when."""
        if self._life is not None:
            now_seconds = self._session.clock.monotonic_seconds()
            self._life.steps.begin(now_seconds, kwargs["took"].stalled_seconds)

    def on_step_end(self, _args: Any, state: Any, control: Any, /, **kwargs: Any) -> None:
        """Note when, plan if there is something new to plan from, and ask for what is due."""
        life, step, took = self._life, state.global_step, kwargs["took"]
        if life is None:
            return
        life.steps.end(self._session.clock.monotonic_seconds(), took.stalled_seconds)
        if life.is_owing:
            life.steps.settle(took.stalled_seconds)
            life.is_owing = False
        if life.due is None and step >= life.plans_at:
            measured = life.steps.measured(took.land_p95)
            if measured is not None:
                self._plan(life, measured, step, kwargs["emit"])
            life.steps.disturb()
        if life.due is not None and step >= life.due:
            control.should_save = True

    def on_save(self, _args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Count from here, whoever asked for the save."""
        life = self._life
        if life is not None:
            life.steps.save(kwargs["took"].spread_seconds)
            life.since, life.plans_at, life.due = state.global_step, state.global_step + 1, None
            life.is_owing = True

    def on_evaluate(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Leave the time of an evaluation out."""
        if self._life is not None:
            self._life.steps.disturb()

    def on_epoch_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Leave out what comes between two epochs."""
        if self._life is not None:
            self._life.steps.disturb()

    def close(self) -> None:
        """Let go of the connection."""
        if self._life is not None:
            self._life.comms.close()
            self._life = None

    def _plan(self, life: _Life, measured: SaveMeasurements, step: int, emit: Any) -> None:
        """Agree on the step of the next save. Collective."""
        told: list[SaveDecision] = []

        def rule(shown: list[Any]) -> int:
            life_seconds = self._session.clock.monotonic_seconds() - life.began_seconds
            mtbf_seconds = life.history.mtbf_seconds(life_seconds)
            told.append(plan(life.every, [SaveMeasurements(*one) for one in shown], mtbf_seconds))
            return told[0].steps

        life.agreements += 1
        topic, within_seconds = str(life.agreements), self._session.args.save_within_seconds
        steps: int = agree(life.comms, topic, measured.to_json(), rule, within_seconds)
        life.due = life.since + steps
        if told and is_told(life.told_seconds, told[0].seconds):
            life.told_seconds = told[0].seconds
            next_step = max(step, life.due)
            emit(SaveScheduleChosen.of(told[0], step, next_step, life.history.failures))


def cadence_callbacks(session: Session) -> list[CadenceCallback]:
    """Return what asks for saves in time, if the arguments say so."""
    return [CadenceCallback(session)] if is_planned(session.args) else []


def history_of(session: Session) -> FailureObservations:
    """Return how often this run has failed, by the newest lives on record.

    A store that does not answer now is no reason to stop training: then nothing is known.
    """
    launch, args = session.gang.launch, session.args
    options = {**(args.storage_options or {}), **launch.storage_options}
    lives = []
    try:
        store = open_store(session.repository, storage_options=options)
        for number in list_numbers(store)[-_LIVES_MAX:]:
            one = read_generation(store, number)
            lives.append((one.cause, one.claimed_at))
    except ResilientError:
        return FailureObservations()
    return observe(lives)
