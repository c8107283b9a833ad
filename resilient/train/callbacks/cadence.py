"""Saves by time, or by what they cost: measures steps and saves, and agrees on the next one.

All ranks come to each agreement at the end of the same step, which every one of them has begun: a
stop that is asked for meanwhile waits for no answer of a rank that is not coming.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.accounting.every import Every, parse_every
from resilient.errors import ResilientError
from resilient.events import Event
from resilient.interval import History, observe
from resilient.storage.open import open_store
from resilient.train.arguments.every import is_planned
from resilient.train.cadence import Measured, Planned, StepTimes, is_told, plan
from resilient.train.callbacks.callback import TrainerCallback
from resilient.vault.registry.generations import list_numbers, read_generation
from resilient.world.agreement import agree

if TYPE_CHECKING:
    from resilient.train.session import Session
    from resilient.world.comms import Comms

_FIRST_STEPS = 4
_LIVES_MAX = 100


@dataclass(frozen=True, slots=True)
class CadenceChosen(Event):
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
    def of(planned: Planned, step: int, next_step: int, failures: int) -> CadenceChosen:
        """Return the fact that ``planned`` holds from ``step`` on."""
        chosen = planned.chosen
        cost, mtbf = (chosen.cost_seconds, chosen.mtbf_seconds) if chosen else (None, None)
        bound = chosen.bound if chosen else ""
        seconds, step_seconds = planned.seconds, planned.step_seconds
        return CadenceChosen(step, next_step, seconds, step_seconds, cost, mtbf, failures, bound)

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

    every: Every
    comms: Comms
    history: History
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
            history=history_of(session) if knows else History(),
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

    def _plan(self, life: _Life, measured: Measured, step: int, emit: Any) -> None:
        """Agree on the step of the next save. Collective."""
        told: list[Planned] = []

        def rule(shown: list[Any]) -> int:
            life_seconds = self._session.clock.monotonic_seconds() - life.began_seconds
            mtbf_seconds = life.history.mtbf_seconds(life_seconds)
            told.append(plan(life.every, [Measured(*one) for one in shown], mtbf_seconds))
            return told[0].steps

        life.agreements += 1
        topic, within_seconds = str(life.agreements), self._session.args.save_within_seconds
        steps: int = agree(life.comms, topic, measured.to_json(), rule, within_seconds)
        life.due = life.since + steps
        if told and is_told(life.told_seconds, told[0].seconds):
            life.told_seconds = told[0].seconds
            next_step = max(step, life.due)
            emit(CadenceChosen.of(told[0], step, next_step, life.history.failures))


def cadence_callbacks(session: Session) -> list[CadenceCallback]:
    """Return what asks for saves in time, if the arguments say so."""
    return [CadenceCallback(session)] if is_planned(session.args) else []


def history_of(session: Session) -> History:
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
        return History()
    return observe(lives)
