"""CheckpointSaver, best model, last save.

How far the last save gets before the host is gone: by the time that is left and past saves.

What a Saver does about a loss that broke: tell it, and keep the last checkpoint before.

Rules for a resume with arguments or objects that differ from the checkpoint's.

When the loop saves, what it saves, and the best model among it.

Steps between saves that memory holds: how often, and when not.

Which model is the best so far, and which checkpoint holds it.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.events import PartsMissing, StepCacheDisabled
from resilient.clock import Timed
from resilient.errors import (
    ConfigError,
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    ResilientError,
    SaveFailed,
)
from resilient.format.keys import CheckpointId, parse_checkpoint
from resilient.in_memory_steps import start_step_cache
from resilient.state_dict.changes import ChangePolicy
from resilient.state_dict.statefuls import plain_value
from resilient.train.arguments.derived import memory_steps
from resilient.train.arguments.resume_rules import FREE, PART, changes_between, require_resumable
from resilient.train.events import ArgumentsChanged, BestModelMissing, FinalSavePlanned, SaveRetried

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from resilient.checkpoint.resume_selection import ResumeResult
    from resilient.checkpoint.save.metadata import CheckpointInfo
    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.clock import Clock
    from resilient.distributed.host_sum import HostLocalSum
    from resilient.events import Emitter, Event
    from resilient.in_memory_steps import StepCache
    from resilient.start_guard import StartGuard
    from resilient.state_dict.snapshot import Part
    from resilient.train.arguments import TrainingArguments
    from resilient.train.ledger import Ledger
    from resilient.train.preemption import StopCoordinator
    from resilient.train.session import Session
    from resilient.train.state import TrainerState

_REMEMBERED = 64
_MARGIN_SECONDS = 1.0


class SaveDestination(IntEnum):
    """Where a save is to get to; of several ranks' the greatest counts, which asks for least."""

    DURABLE = 0
    """The repository, and with a near one both."""
    NEAR = 1
    """The near repository alone; the next life goes on from there if it runs on this host."""
    MEMORY = 2
    """The keeper, which makes it durable after the trainers are gone, if it is left the time."""
    IN_FLIGHT = 3
    """Nothing new: what is in flight is finished."""


@dataclass(slots=True)
class SaveTimings:
    """What the saves of this life took, the last ones of them.

    Attributes:
        copy_seconds: until training could go on.
        land_seconds: from the beginning until it was committed, in the near repository if there
            is one, less what it rested: with somebody waiting for it, it takes no longer.
        spread_seconds: of the last save, its rests among them; None before the first.
        stalled_seconds: that training has waited for all saves together.
    """

    copy_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    land_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    spread_seconds: float | None = None
    stalled_seconds: float = 0.0

    def stalling(self, clock: Clock) -> Timed:
        """Add the time spent inside to what training has waited."""
        return Timed(clock, self._waited)

    def _waited(self, seconds: float) -> None:
        self.stalled_seconds += seconds

    def landed(self, took_seconds: float, rested_seconds: float) -> None:
        """Remember a save that is durable.

        Args:
            took_seconds: from its beginning.
            rested_seconds: of these it rested, for nobody waited for it.
        """
        self.land_seconds.append(max(took_seconds - rested_seconds, 0.0))
        self.spread_seconds = took_seconds

    @property
    def land_p95(self) -> float | None:
        """What 19 of 20 saves did not exceed; None before the first."""
        return p95(self.land_seconds)


def p95(values: Collection[float]) -> float | None:
    """Return the least of ``values`` that 95 of 100 do not exceed (nearest rank); None of none."""
    if not values:
        return None
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def choose_tier(
    left_seconds: float, took: SaveTimings, *, has_near: bool, has_keeper: bool
) -> SaveDestination:
    """Return the safest tier that a save reaches in time.

    With nothing measured the safest: trying loses nothing. Else by the p95; if by that no tier is
    reached, by the fastest save so far, because a try that fails harms nothing either.

    Args:
        left_seconds: until the process must be gone.
        took: past saves.
        has_near: whether saves go to a near repository first. A promotion is taken to last as
            long as a save, for it carries the same bytes.
        has_keeper: whether a keeper makes durable what it was handed.
    """
    land = took.land_p95
    if land is None:
        return SaveDestination.DURABLE
    needs = {SaveDestination.DURABLE: 2 * land if has_near else land}
    if has_near:
        needs[SaveDestination.NEAR] = land
    if has_keeper:
        needs[SaveDestination.MEMORY] = p95(took.copy_seconds) or 0.0
    for tier, seconds in needs.items():
        if seconds + _MARGIN_SECONDS <= left_seconds:
            return tier
    if min(took.land_seconds) <= left_seconds:
        return SaveDestination.NEAR if has_near else SaveDestination.DURABLE
    return SaveDestination.IN_FLIGHT


class MindingSaver:
    """The part of a Saver that hears of broken numbers.

    Attributes:
        best: names the checkpoints that no rotation may take.
        emit: where events go.
    """

    best: BestCheckpoint
    emit: Emitter
    _state: TrainerState
    _saved: CheckpointId | None
    _is_coordinator: bool

    @property
    def step(self) -> int:
        """The last optimizer step."""
        return self._state.global_step

    def mind(self, broke: Sequence[Event], *, is_broken: bool) -> None:
        """Tell how numbers broke; while they are none, keep the last checkpoint before that."""
        self.best.mind(self._saved, begins=bool(broke), is_broken=is_broken)
        for one in broke if self._is_coordinator else ():
            self.emit(one, step=self.step)


_RANK = re.compile(r"_\d+$")


def check_resumable(config: Mapping[str, Any], args: TrainingArguments, emit: Emitter) -> None:
    """Tell how this life's arguments differ from those that saved, then refuse some.

    Args:
        config: of the run that saved.
        args: of this one.
        emit: whom to tell.

    Raises:
        ConfigError: one differs that cannot.
        IncompatibleCheckpoint: it was saved to hold the model alone.
    """
    if config.get("save_only_model"):
        raise IncompatibleCheckpoint(
            "the checkpoint holds only a model (`save_only_model`), and training cannot go on "
            "from that: take an older one that is whole, or begin anew from its weights with "
            "`trainer.load_model(...)` and `trainer.train(False)`",
            hint="resilient ckpt ls",
        )
    changes = changes_between(config, args.to_dict())
    if changes:
        emit(ArgumentsChanged(changes))
    require_resumable(changes, args.resume_changes)


def policy_for(args: TrainingArguments, known: Collection[str]) -> ChangePolicy:
    """Return which differences of objects a resume allows.

    Args:
        args: of this run; ``resume_changes`` has ``part:NAME``.
        known: names of parts that the trainer makes, and of those that the user registered.
    """
    allowed = args.resume_changes or ()

    def compares_options(config: Mapping[str, Any]) -> bool:
        # Options that follow from arguments are reported as arguments.
        changed = changes_between(config, args.to_dict()).values()
        return all(one.rule.kind == FREE for one in changed)

    def lost(held: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(one for one in held if whose_part(one) not in known))

    return ChangePolicy(
        frozenset([allowed] if isinstance(allowed, str) else allowed),
        compares_options,
        lost,
        "give the objects that saved it (trainer.register(name, thing) for a part of yours), or "
        "allow the difference: TrainingArguments(resume_changes=[{names}])",
        PART,
    )


def whose_part(name: str) -> str:
    """Return the name of a part without the number of the rank that has it."""
    return _RANK.sub("", name)


WARM_AT = 2
_MODEL_ONLY = ("model", "trainer_state")


class Saver(MindingSaver):
    """Saves a run and resumes it.

    Args:
        checkpointer: where checkpoints go.
        parts: everything that a checkpoint holds, by name.
        about: what a checkpoint says of itself, asked at each save.
        best: which checkpoint holds the best model.
        state: counts steps; told where the best model is.
        args: ``on_save_failure``, ``save_overlap``.
        session: where events go, and whether this host has a keeper.
        ledger: of samples; a segment of it is saved with each checkpoint.

    Attributes:
        took: what the saves of this life took.
        reserved: names of parts that the trainer has of itself, or has with other arguments.
    """

    reserved: Collection[str] = ()

    def __init__(  # noqa: PLR0913 - the one place where a run meets its checkpoints
        self,
        checkpointer: CheckpointEngine,
        parts: dict[str, Part],
        *,
        about: Callable[[], CheckpointInfo],
        best: BestCheckpoint,
        state: TrainerState,
        args: TrainingArguments,
        session: Session,
        ledger: Ledger,
    ) -> None:
        self.parts = parts
        self.best = best
        self.emit = session.emit
        self._checkpointer = checkpointer
        self._about = about
        self._state = state
        self._is_coordinator = session.world.is_coordinator
        self._has_keeper = bool(session.gang.launch.keeper)
        self._args = args
        self.ledger = ledger
        # What is saved at step 0 is nothing: a new life would begin the same way.
        self.took = SaveTimings()
        self._saved: CheckpointId | None = None
        self.begun: CheckpointId | None = None
        self._saved_step = 0
        self._updates = 0

    def settle(self, wish: str, *, is_first: bool) -> str:
        """Return the reference that this attempt resumes from under the user's wish. Collective.

        Raises:
            NoIntactCheckpoint: A checkpoint of this run was lost, or may be one that is there.
        """
        return self._checkpointer.settle(wish, is_first=is_first)

    def resume(self, ref: str, cause: str, guard: StartGuard | None = None) -> ResumeResult | None:
        """Restore everything from where the last life got to, if there was one. Collective.

        Raises:
            ConfigError: an argument differs from the checkpoint's that cannot.
            StartOverRefused: the guard found checkpoints that a start at step 0 would ignore.
            NothingToResume: the guard requires a checkpoint, and there is none.
        """

        def look(config: Mapping[str, Any]) -> None:
            check_resumable(config, self._args, self.emit)

        policy = policy_for(self._args, {*self.reserved, *self.parts})
        resumed = self._checkpointer.resume(
            self.parts, ref=ref, cause=cause, examine=look, guard=guard, policy=policy
        )
        self.emit = self.emit.bind(generation=self._checkpointer.generation)
        if resumed is None:
            return None
        self._saved, self._saved_step = resumed.checkpoint, resumed.step
        self.begun = resumed.checkpoint
        if resumed.absent:
            self.emit(PartsMissing(resumed.absent))
        return resumed

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint of this life, or one that it began from."""
        return self._saved is not None

    def begin_again(self, checkpointer: CheckpointEngine) -> ResumeResult | None:
        """Begin another life from the newest checkpoint that all ranks can prove. Collective.

        Waits for the save in flight, in every tier; one that failed is passed over where the
        arguments say that training goes on without it. The next save takes place though its
        step may have been saved, by the life before.

        Crash: what is committed is what it was.

        Raises:
            SaveFailed: the save in flight failed, and the arguments say that this stops training.
        """
        try:
            self.wait()
        except SaveFailed as error:
            self._go_on_without(error)
        self._checkpointer.close()
        self._checkpointer = checkpointer
        resumed = self.resume("auto", "rollback")
        self.outdate()
        return resumed

    @property
    def generation(self) -> int:
        """The number of this life."""
        return self._checkpointer.generation

    def save(self) -> bool:
        """Save this step unless it is saved; False if it was. Collective.

        Raises:
            SaveFailed: the save before failed, and the arguments say that this stops training.
        """
        step = self._state.global_step
        if step == self._saved_step:
            return False
        if self._state.best_global_step == step:
            self._name_best(CheckpointId(self._checkpointer.generation, step))
        with self.took.stalling(self.emit.clock):
            self._measure()
            try:
                self._saved = self._save_once(step)
            except SaveFailed as error:
                self._go_on_without(error)
                self._saved = self._save_once(step)
        self._saved_step = step
        return True

    def outdate(self) -> None:
        """Have this step saved, if that is asked for, though a life before has saved it."""
        self._saved_step = -1

    def before_update(self) -> None:
        """Wait until the state may change that the last save is still copying.

        Before the second step, when optimizers have their state, also get memory for the first
        save.
        """
        with self.took.stalling(self.emit.clock):
            self._checkpointer.before_update()
        self._updates += 1
        if self._updates == WARM_AT and self._args.save_strategy != "no":
            self._checkpointer.warm(self._saved_parts)

    def found_best(self) -> None:
        """Remember that the model of this step is the best, if a checkpoint holds it already."""
        if self._saved is not None and self._saved_step == self._state.global_step:
            self._name_best(self._saved)

    def wait(self) -> None:
        """Wait until everything saved is durable, and with tiers the last in each of them.

        Raises:
            SaveFailed: it could not be made so.
        """
        self._checkpointer.wait(in_every_tier=True)

    def choose_tier(self, gate: StopCoordinator) -> SaveDestination:
        """Return how far the last save can get in the time that is left. Collective.

        The rank that has the least time, or the slowest saves, decides.
        """
        step = self._state.global_step
        if step == self._saved_step:
            return SaveDestination.DURABLE
        self._measure()
        near, keeper = bool(self._args.near_repo), self._has_keeper
        mine = choose_tier(gate.left_seconds, self.took, has_near=near, has_keeper=keeper)
        tier = SaveDestination(gate.meet(mine))
        self.emit(FinalSavePlanned(step, tier.name, gate.left_seconds, self.took.land_p95))
        return tier

    def leave(self, gate: StopCoordinator, tier: SaveDestination) -> None:
        """Wait as long as the tier asks for; a keeper that has the bytes is not waited for.

        Raises:
            SaveFailed: it could not be made durable.
        """
        step = self._state.global_step
        if tier is SaveDestination.MEMORY:
            self._checkpointer.before_update()
            gate.go(f"step {step} is handed to the keeper, which makes it durable")
        self._checkpointer.wait()
        if tier is not SaveDestination.IN_FLIGHT:
            gate.landed(step)
        if tier is SaveDestination.DURABLE:
            self._checkpointer.wait(in_every_tier=True)

    def load_best(self) -> None:
        """Load the weights of the best model that a checkpoint holds, or keep the last. Collective.

        A run that is trained to its end must not fail for this, life after life; so what cannot
        be loaded is told, and all ranks decide alike.
        """
        best, step = self.best.checkpoint, self._state.best_global_step
        if best is None:
            self.emit(BestModelMissing("", "no checkpoint holds it; the last weights stay"))
            return
        try:
            if best != self._saved:
                self._checkpointer.load_part(best, "model", self.parts["model"])
        except (IntegrityError, KeyNotFound, IncompatibleCheckpoint) as error:
            self.emit(BestModelMissing(str(best), f"{error.message}; the last weights stay"))
            return
        if step != best.step:
            why = f"it is of step {step}, which was not saved; these weights are of {best}"
            self.emit(BestModelMissing(str(best), why))

    def close(self) -> None:
        """Let go of the repository."""
        self._checkpointer.close()

    @property
    def _saved_parts(self) -> dict[str, Part]:
        """What a checkpoint holds: all, or the model and its history (``save_only_model``)."""
        if not self._args.save_only_model:
            return self.parts
        return {name: self.parts[name] for name in _MODEL_ONLY}

    def _measure(self) -> None:
        """Wait for the save in flight, as the next one would, and remember what it took.

        Raises:
            SaveFailed: it failed, and the arguments say that this stops training.
        """
        persister = self._checkpointer.in_flight
        if persister is None:
            return
        try:
            self._checkpointer.wait()
        except SaveFailed as error:
            self._go_on_without(error)
        else:
            self.took.landed(persister.took_seconds, persister.rested_seconds)

    def _go_on_without(self, error: SaveFailed) -> None:
        """Go on after a save that failed, unless the arguments say that this stops training."""
        if self._args.on_save_failure == "stop":
            raise error
        self.ledger.reopen()
        self.emit(SaveRetried(error.message))

    def _save_once(self, step: int) -> CheckpointId:
        began_seconds = self.emit.clock.monotonic_seconds()
        try:
            return self._save_now(step)
        finally:
            self.took.copy_seconds.append(self.emit.clock.monotonic_seconds() - began_seconds)

    def _save_now(self, step: int) -> CheckpointId:
        measured, closes = self._state.measured(), self.ledger.close
        about = replace(self._about(), metrics=measured, ledger=closes)
        return self._checkpointer.save(
            step, self._saved_parts, about, keep=self.best.kept, overlap=self._args.save_overlap
        )

    def _name_best(self, checkpoint: CheckpointId) -> None:
        self.best.checkpoint = checkpoint
        self._state.best_model_checkpoint = f"checkpoint-{checkpoint.step}"


class HoldingSaver(Saver):
    """A Saver that also holds steps in memory, if ``save_every`` says ``memory=...``."""

    _holding: StepCache | None = None
    _is_on: bool | None = None
    near_sums: HostLocalSum | None = None
    """Adds numbers of all ranks up, where they hold steps and are on one host; all have it then."""

    def __init__(
        self,
        checkpointer: CheckpointEngine,
        parts: dict[str, Part],
        *,
        session: Session,
        **more: Any,
    ) -> None:
        super().__init__(checkpointer, parts, session=session, **more)
        self._lull = session.lull

    def holds(self) -> bool:
        """Say whether this step is to be held; the same on every rank."""
        return self._holds_at(self._state.global_step)

    def will_hold(self) -> bool:
        """Say whether the step that is about to update is to be held, as far as is known."""
        return self._holds_at(self._state.global_step + 1)

    def _holds_at(self, step: int) -> bool:
        steps = memory_steps(self._args)
        if not steps or step % steps or step == self._saved_step or self._is_on is False:
            return False
        # The memory of saves comes first.
        return self._updates > WARM_AT

    def hold(self) -> None:
        """Hold this step in memory; it is no checkpoint unless ranks die. Collective.

        What goes wrong on one rank is told once; then nothing is held that all of them have.
        """
        if self._is_on is None:
            self._holding = start_step_cache(self._checkpointer, self._lull)
            self._is_on = self._holding is not None
            # The ranks go on to add so though one of them has let go of what it holds.
            self.near_sums = self._holding.near_sums if self._holding is not None else None
        if self._holding is None:
            return
        measured, peeks = self._state.measured(), self.ledger.peek
        about = replace(self._about(), metrics=measured, ledger=peeks)
        step, overlap = self._state.global_step, self._args.save_overlap
        try:
            self._holding.hold(step, self.parts, about, overlap=overlap)
        except ResilientError as error:
            self.emit(StepCacheDisabled(error.message))
            self._let_go(drops=True)

    def before_update(self) -> None:
        """Wait until the state may change that a save, or what is held, is still copying."""
        if self._holding is not None:
            self._holding.before_update()
        super().before_update()

    def begin_again(self, checkpointer: CheckpointEngine) -> ResumeResult | None:
        """Begin another life from a checkpoint, and forget the steps that are given up."""
        self._let_go(drops=True)
        self._is_on = self.near_sums = None
        return super().begin_again(checkpointer)

    def close(self) -> None:
        """Let go of the repository; what is held lands if it is newer than what is saved."""
        self._let_go(drops=False)
        super().close()

    def _let_go(self, *, drops: bool) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            if drops:
                holding.drop()
            holding.close()


@dataclass(slots=True)
class BestCheckpoint:
    """Which checkpoint holds the best model; kept apart from the trainer's state.

    Its generation tells how often the run was restarted, which two equal runs may differ in.
    """

    checkpoint: CheckpointId | None = None
    sound: CheckpointId | None = None
    """The last before the loss broke, for as long as it is broken."""

    @property
    def kept(self) -> list[CheckpointId]:
        """What no rotation may take."""
        return [one for one in (self.checkpoint, self.sound) if one]

    def mind(self, saved: CheckpointId | None, *, begins: bool, is_broken: bool) -> None:
        """Hold on to the last checkpoint before the loss broke, until it is good again.

        Args:
            saved: the last checkpoint.
            begins: whether the loss was good until now.
            is_broken: whether it is no number.
        """
        if not is_broken:
            self.sound = None
        elif begins and self.sound is None:
            self.sound = saved

    def state_dict(self) -> dict[str, str]:
        """Return the folders' names, or nothing."""
        sound = {"sound": str(self.sound)} if self.sound else {}
        return {"checkpoint": str(self.checkpoint) if self.checkpoint else "", **sound}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the names."""
        self.checkpoint = parse_checkpoint(state_dict["checkpoint"])
        self.sound = parse_checkpoint(state_dict.get("sound", ""))


def is_best(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]) -> bool:
    """Say whether the model that ``metrics`` are of is the best so far, and note it in ``state``.

    Raises:
        ConfigError: ``metric_for_best_model`` is none of them, or is no number.
    """
    if args.metric_for_best_model is None:
        return False
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    if name not in metrics:
        raise ConfigError(f"`metric_for_best_model` `{name}` is none of {sorted(metrics)}")
    up, value = bool(args.greater_is_better), plain_value(metrics[name])
    if not isinstance(value, int | float):
        raise ConfigError(
            f"`metric_for_best_model` `{name}` is a value of the class `{type(value).__name__}`, "
            "which cannot be compared",
            hint=f"return one number as `{name}` from `compute_metrics`",
        )
    if not improves(value, state.best_metric, greater_is_better=up):
        return False
    state.best_metric = value
    if args.save_strategy != "no":
        state.best_global_step = state.global_step
    return True


def improves(value: float, best: float | None, *, greater_is_better: bool) -> bool:
    """Say whether ``value`` beats ``best``: strictly, and anything beats nothing."""
    if best is None:
        return value == value  # noqa: PLR0124 - a NaN is not equal to itself, and beats nothing
    return value > best if greater_is_better else value < best
