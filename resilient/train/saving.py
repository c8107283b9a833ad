"""When the loop saves, what it saves, and the best model among it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    SaveFailed,
)
from resilient.format.names import CheckpointId
from resilient.train.leaving import SavesTook, Tier, choose_tier
from resilient.train.minding import MindingSaver
from resilient.train.reporting import (
    BestModelMissing,
    LastSaveChosen,
    SaveRetried,
)
from resilient.train.resuming import examine, policy_for
from resilient.vault.facts import PartsStartedFresh

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from resilient.checkpointer import About, Checkpointer
    from resilient.start_guard import StartGuard
    from resilient.state.capture import Part
    from resilient.train.arguments import TrainingArguments
    from resilient.train.best import Best
    from resilient.train.ledger import Ledger
    from resilient.train.session import Session
    from resilient.train.state import TrainerState
    from resilient.train.stop import StopGate
    from resilient.vault.reading.choose import Resumed

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
        checkpointer: Checkpointer,
        parts: dict[str, Part],
        *,
        about: Callable[[], About],
        best: Best,
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
        self.took = SavesTook()
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

    def resume(self, ref: str, cause: str, guard: StartGuard | None = None) -> Resumed | None:
        """Restore everything from where the last life got to, if there was one. Collective.

        Raises:
            ConfigError: an argument differs from the checkpoint's that cannot.
            StartOverRefused: the guard found checkpoints that a start at step 0 would ignore.
            NothingToResume: the guard requires a checkpoint, and there is none.
        """

        def look(config: Mapping[str, Any]) -> None:
            examine(config, self._args, self.emit)

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
            self.emit(PartsStartedFresh(resumed.absent))
        return resumed

    @property
    def has_saved(self) -> bool:
        """Whether there is a checkpoint of this life, or one that it began from."""
        return self._saved is not None

    def begin_again(self, checkpointer: Checkpointer) -> Resumed | None:
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

    def choose_tier(self, gate: StopGate) -> Tier:
        """Return how far the last save can get in the time that is left. Collective.

        The rank that has the least time, or the slowest saves, decides.
        """
        step = self._state.global_step
        if step == self._saved_step:
            return Tier.DURABLE
        self._measure()
        near, keeper = bool(self._args.near_repo), self._has_keeper
        mine = choose_tier(gate.left_seconds, self.took, has_near=near, has_keeper=keeper)
        tier = Tier(gate.meet(mine))
        self.emit(LastSaveChosen(step, tier.name, gate.left_seconds, self.took.land_p95))
        return tier

    def leave(self, gate: StopGate, tier: Tier) -> None:
        """Wait as long as the tier asks for; a keeper that has the bytes is not waited for.

        Raises:
            SaveFailed: it could not be made durable.
        """
        step = self._state.global_step
        if tier is Tier.MEMORY:
            self._checkpointer.before_update()
            gate.go(f"step {step} is handed to the keeper, which makes it durable")
        self._checkpointer.wait()
        if tier is not Tier.IN_FLIGHT:
            gate.landed(step)
        if tier is Tier.DURABLE:
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
