"""Saver of a run: saves, the best model, the last save before a stop, and the step cache.

The step cache keeps a step in memory, so that the step can become a checkpoint if ranks die. At a
resume, the saver also compares the arguments and objects with those in the checkpoint. Before a
preemption, the saver selects a destination that the last save can reach in the remaining time.
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
    from resilient.format.ledger import Segment
    from resilient.in_memory_steps import StepCache
    from resilient.start_guard import StartGuard
    from resilient.state_dict.snapshot import Part
    from resilient.train.arguments import TrainingArguments
    from resilient.train.preemption import StopCoordinator
    from resilient.train.sample_ledger import Ledger
    from resilient.train.session import Session
    from resilient.train.state import TrainerState

_REMEMBERED = 64
_MARGIN_SECONDS = 1.0


class SaveDestination(IntEnum):
    """Destination of a save. The ranks use the greatest value, which needs the least time."""

    DURABLE = 0
    """The repository, and the near repository if there is one."""
    NEAR = 1
    """Only the near repository; the next attempt continues from there if it runs on this host."""
    MEMORY = 2
    """The saver daemon, which makes the save durable after the trainers exit, if time remains."""
    IN_FLIGHT = 3
    """No new save: only the save in flight is finished."""


@dataclass(slots=True)
class SaveTimings:
    """Durations of this attempt's most recent saves.

    Attributes:
        copy_seconds: Time from the start until training could continue.
        commit_seconds: Time from the start until the commit, to the near repository if there is
            one. Throttle pauses are left out, because a save does not pause while a caller waits.
        last_save_seconds: Duration of the last save, pauses included; None before the first.
        waited_seconds: Total time that training has waited for saves.
    """

    copy_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    commit_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    last_save_seconds: float | None = None
    waited_seconds: float = 0.0

    def measure_wait(self, clock: Clock) -> Timed:
        """Return a context that adds the time spent inside to the time training has waited."""
        return Timed(clock, self._waited)

    def _waited(self, seconds: float) -> None:
        self.waited_seconds += seconds

    def record_commit(self, took_seconds: float, rested_seconds: float) -> None:
        """Record a save that is durable.

        Args:
            took_seconds: Time since its start.
            rested_seconds: Part of this time in throttle pauses, taken because training did not
                wait.
        """
        self.commit_seconds.append(max(took_seconds - rested_seconds, 0.0))
        self.last_save_seconds = took_seconds

    @property
    def commit_p95(self) -> float | None:
        """Duration that 19 of 20 saves did not exceed; None before the first."""
        return p95(self.commit_seconds)


def p95(values: Collection[float]) -> float | None:
    """Return the least of ``values`` that 95 of 100 do not exceed (nearest rank), or None."""
    if not values:
        return None
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def choose_tier(
    left_seconds: float, timings: SaveTimings, *, has_near: bool, has_daemon: bool
) -> SaveDestination:
    """Return the safest tier that a save reaches in time.

    A failed save loses nothing, so the choice is optimistic. Without measurements the result is the
    safest tier. Otherwise the p95 of past saves decides. If no tier is reached within the p95, the
    fastest save so far decides.

    Args:
        left_seconds: Time until the process must exit.
        timings: Timings of past saves.
        has_near: Whether saves go to a near repository first. A promotion is assumed to take as
            long as a save, because it copies the same bytes.
        has_daemon: Whether a saver daemon makes handed-over bytes durable.
    """
    commit_seconds = timings.commit_p95
    if commit_seconds is None:
        return SaveDestination.DURABLE
    needs = {SaveDestination.DURABLE: 2 * commit_seconds if has_near else commit_seconds}
    if has_near:
        needs[SaveDestination.NEAR] = commit_seconds
    if has_daemon:
        needs[SaveDestination.MEMORY] = p95(timings.copy_seconds) or 0.0
    for tier, seconds in needs.items():
        if seconds + _MARGIN_SECONDS <= left_seconds:
            return tier
    if min(timings.commit_seconds) <= left_seconds:
        return SaveDestination.NEAR if has_near else SaveDestination.DURABLE
    return SaveDestination.IN_FLIGHT


_RANK = re.compile(r"_\d+$")


def check_resumable(config: Mapping[str, Any], args: TrainingArguments, emit: Emitter) -> None:
    """Report how arguments differ from those of the checkpoint, and refuse some differences.

    Args:
        config: Arguments of the run that saved.
        args: Arguments of this run.
        emit: Receiver of the event.

    Raises:
        ConfigError: An argument differs, and its rule forbids the difference.
        IncompatibleCheckpoint: The checkpoint has only the model.
    """
    if config.get("save_only_model"):
        raise IncompatibleCheckpoint(
            "the checkpoint holds only a model (`save_only_model`), so training cannot resume "
            "from it: take an older complete checkpoint, or start again from its weights with "
            "`trainer.load_model(...)` and `trainer.train(False)`",
            hint="resilient ckpt ls",
        )
    changes = changes_between(config, args.to_dict())
    if changes:
        emit(ArgumentsChanged(changes))
    require_resumable(changes, args.resume_changes)


def policy_for(args: TrainingArguments, known_names: Collection[str]) -> ChangePolicy:
    """Return the policy for objects that differ from the checkpoint's.

    Args:
        args: Arguments of this run; ``resume_changes`` may contain ``part:NAME``.
        known_names: Names of the parts that the trainer makes and that the user registered.
    """
    allowed = args.resume_changes or ()

    def compares_options(config: Mapping[str, Any]) -> bool:
        # Options that arguments determine are already reported as arguments.
        changed = changes_between(config, args.to_dict()).values()
        return all(change.rule.kind == FREE for change in changed)

    def unknown_parts(saved: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(name for name in saved if base_part_name(name) not in known_names))

    return ChangePolicy(
        frozenset([allowed] if isinstance(allowed, str) else allowed),
        compares_options,
        unknown_parts,
        "pass the objects that were saved (trainer.register(name, thing) for your own part), or "
        "allow the difference: TrainingArguments(resume_changes=[{names}])",
        PART,
    )


def base_part_name(name: str) -> str:
    """Return a part's name without the rank number."""
    return _RANK.sub("", name)


WARM_AT = 2
_MODEL_ONLY = ("model", "trainer_state")


class CheckpointSaver:
    """Saver of a run's checkpoints, which also resumes from them.

    If ``save_every`` contains ``memory=...``, the saver also caches steps in memory.

    Args:
        checkpointer: Engine that writes and reads checkpoints.
        parts: All parts of a checkpoint, by name.
        describe_checkpoint: Returns the checkpoint's description at each save.
        best: Name of the checkpoint with the best model.
        state: Trainer state, which counts steps and records the best model's checkpoint.
        args: Arguments; ``on_save_failure`` and ``save_overlap`` are used.
        session: Destination of events, and whether this host has a saver daemon.
        ledger: Sample ledger; a segment of it is saved with each checkpoint.

    Attributes:
        best: Names of the checkpoints that garbage collection must keep.
        emit: Destination of events.
        timings: Durations of this attempt's saves.
        resumed_from: Checkpoint from which this attempt continued.
        near_sums: Sum of a number over ranks, if all ranks run on one host and cache steps.
        reserved: Names of the trainer's own parts under any arguments.
    """

    reserved: Collection[str] = ()

    def __init__(  # noqa: PLR0913 - joins all objects of a run that a checkpoint needs
        self,
        checkpointer: CheckpointEngine,
        parts: dict[str, Part],
        *,
        describe_checkpoint: Callable[[], CheckpointInfo],
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
        self._describe_checkpoint = describe_checkpoint
        self._state = state
        self._is_coordinator = session.world.is_coordinator
        self._has_daemon = bool(session.rank_group.launch.keeper)
        self._args = args
        self.ledger = ledger
        # Step 0 needs no save, because a new attempt begins with the same state.
        self.timings = SaveTimings()
        self._last_checkpoint: CheckpointId | None = None
        self.resumed_from: CheckpointId | None = None
        self._saved_step = 0
        self._updates = 0
        self._interpreter_idle = session.interpreter_idle
        self._step_cache: StepCache | None = None
        # None until the first step that must be cached; this step starts the cache, or fails.
        self._caches_steps: bool | None = None
        self.near_sums: HostLocalSum | None = None

    @property
    def step(self) -> int:
        """Number of the last optimizer step."""
        return self._state.global_step

    def settle(self, resume_option: str, *, is_first: bool) -> str:
        """Return the reference that this attempt resumes from, given the user's choice. Collective.

        Raises:
            NoIntactCheckpoint: A checkpoint of this run was lost, or an existing checkpoint may
                belong to this run.
        """
        return self._checkpointer.settle(resume_option, is_first=is_first)

    def resume(self, ref: str, cause: str, guard: StartGuard | None = None) -> ResumeResult | None:
        """Restore everything from the last attempt's checkpoint, if there is one. Collective.

        Raises:
            ConfigError: An argument differs from the checkpoint's, and its rule forbids the
                difference.
            StartOverRefused: The guard found checkpoints that a start at step 0 would ignore.
            NothingToResume: The guard requires a checkpoint, and there is none.
        """

        def check_config(config: Mapping[str, Any]) -> None:
            check_resumable(config, self._args, self.emit)

        policy = policy_for(self._args, {*self.reserved, *self.parts})
        resume_result = self._checkpointer.resume(
            self.parts, ref=ref, cause=cause, examine=check_config, guard=guard, policy=policy
        )
        self.emit = self.emit.bind(generation=self._checkpointer.generation)
        if resume_result is None:
            return None
        self._last_checkpoint, self._saved_step = resume_result.checkpoint, resume_result.step
        self.resumed_from = resume_result.checkpoint
        if resume_result.absent:
            self.emit(PartsMissing(resume_result.absent))
        return resume_result

    @property
    def has_saved(self) -> bool:
        """True if this attempt saved a checkpoint or began from one."""
        return self._last_checkpoint is not None

    def begin_again(self, checkpointer: CheckpointEngine) -> ResumeResult | None:
        """Begin another attempt from the newest checkpoint that all ranks can verify. Collective.

        The cached steps of the previous attempt are dropped. The call waits for the save in flight
        in every tier. A failed save is skipped if ``on_save_failure`` lets training continue. The
        next save takes place even if the previous attempt saved its step.

        Crash: committed checkpoints are unchanged.

        Raises:
            SaveFailed: The save in flight failed, and ``on_save_failure`` stops training.
        """
        self._close_step_cache(drops=True)
        self._caches_steps = self.near_sums = None
        try:
            self.wait()
        except SaveFailed as error:
            self._continue_without(error)
        self._checkpointer.close()
        self._checkpointer = checkpointer
        resume_result = self.resume("auto", "rollback")
        self.allow_resave()
        return resume_result

    @property
    def generation(self) -> int:
        """Generation number of this attempt."""
        return self._checkpointer.generation

    def save(self) -> bool:
        """Save this step; return False if it is already saved. Collective.

        Raises:
            SaveFailed: The previous save failed, and ``on_save_failure`` stops training.
        """
        step = self._state.global_step
        if step == self._saved_step:
            return False
        if self._state.best_global_step == step:
            self._name_best(CheckpointId(self._checkpointer.generation, step))
        with self.timings.measure_wait(self.emit.clock):
            self._measure()
            try:
                self._last_checkpoint = self._save_once(step)
            except SaveFailed as error:
                self._continue_without(error)
                self._last_checkpoint = self._save_once(step)
        self._saved_step = step
        return True

    def allow_resave(self) -> None:
        """Allow this step to be saved again although an earlier attempt saved it."""
        self._saved_step = -1

    def before_update(self) -> None:
        """Wait until the last save and the step cache have copied what the next update changes.

        Before the second step, when optimizers have their state, also allocate memory for the first
        save.
        """
        if self._step_cache is not None:
            self._step_cache.before_update()
        with self.timings.measure_wait(self.emit.clock):
            self._checkpointer.before_update()
        self._updates += 1
        if self._updates == WARM_AT and self._args.save_strategy != "no":
            self._checkpointer.warm(self._saved_parts)

    def caches_this_step(self) -> bool:
        """Return whether this step must be cached; the same on every rank."""
        return self._caches_at(self.step)

    def caches_next_step(self) -> bool:
        """Return whether the next step must be cached, as far as is known before its update."""
        return self._caches_at(self.step + 1)

    def _caches_at(self, step: int) -> bool:
        steps = memory_steps(self._args)
        if not steps or step % steps or step == self._saved_step or self._caches_steps is False:
            return False
        # The first save must allocate its memory before the cache does.
        return self._updates > WARM_AT

    def cache_step(self) -> None:
        """Cache this step in memory. The step becomes a checkpoint only if ranks die. Collective.

        An error on one rank is reported once. After the error, no rank caches further steps.
        """
        if self._caches_steps is None:
            cache = self._step_cache = start_step_cache(self._checkpointer, self._interpreter_idle)
            self._caches_steps = cache is not None
            # All ranks continue to sum with this method, even if one of them dropped its cache.
            self.near_sums = cache.near_sums if cache is not None else None
        if self._step_cache is None:
            return
        checkpoint_info, overlap = self._describe(self.ledger.peek), self._args.save_overlap
        try:
            self._step_cache.hold(self.step, self.parts, checkpoint_info, overlap=overlap)
        except ResilientError as error:
            self.emit(StepCacheDisabled(error.message))
            self._close_step_cache(drops=True)

    def note_broken_loss(self, broke: Sequence[Event], *, is_broken: bool) -> None:
        """Report broken losses; while the loss is broken, keep the last checkpoint before it."""
        self.best.note_broken_loss(self._last_checkpoint, begins=bool(broke), is_broken=is_broken)
        for reason in broke if self._is_coordinator else ():
            self.emit(reason, step=self.step)

    def record_best(self) -> None:
        """Record this step's model as the best, if a checkpoint already has it."""
        if self._last_checkpoint is not None and self._saved_step == self._state.global_step:
            self._name_best(self._last_checkpoint)

    def wait(self) -> None:
        """Wait until all saves are durable; with tiers, until the last save is in each of them.

        Raises:
            SaveFailed: A save could not be made durable.
        """
        self._checkpointer.wait(in_every_tier=True)

    def choose_tier(self, gate: StopCoordinator) -> SaveDestination:
        """Return the destination that the last save can reach in the remaining time. Collective.

        The rank with the least time or the slowest saves decides.
        """
        step = self._state.global_step
        if step == self._saved_step:
            return SaveDestination.DURABLE
        self._measure()
        has_near_repo, daemon = bool(self._args.near_repo), self._has_daemon
        own_tier = choose_tier(
            gate.left_seconds, self.timings, has_near=has_near_repo, has_daemon=daemon
        )
        tier = SaveDestination(gate.agree_on_maximum(own_tier))
        self.emit(FinalSavePlanned(step, tier.name, gate.left_seconds, self.timings.commit_p95))
        return tier

    def leave(self, gate: StopCoordinator, tier: SaveDestination) -> None:
        """Wait as long as the tier requires, but not for a saver daemon that has the bytes.

        Raises:
            SaveFailed: The save could not be made durable.
        """
        step = self._state.global_step
        if tier is SaveDestination.MEMORY:
            self._checkpointer.before_update()
            gate.exit_preempted(
                f"step {step} was handed to the saver daemon, which makes it durable"
            )
        self._checkpointer.wait()
        if tier is not SaveDestination.IN_FLIGHT:
            gate.record_durable(step)
        if tier is SaveDestination.DURABLE:
            self._checkpointer.wait(in_every_tier=True)

    def load_best(self) -> None:
        """Load the weights of the best saved model, or keep the last weights. Collective.

        A failure is only reported, because otherwise a finished run would fail at every restart.
        All ranks make the same decision.
        """
        best, step = self.best.checkpoint, self._state.best_global_step
        if best is None:
            self.emit(
                BestModelMissing("", "no checkpoint holds the best model; the last weights stay")
            )
            return
        try:
            if best != self._last_checkpoint:
                self._checkpointer.load_part(best, "model", self.parts["model"])
        except (IntegrityError, KeyNotFound, IncompatibleCheckpoint) as error:
            self.emit(BestModelMissing(str(best), f"{error.message}; the last weights stay"))
            return
        if step != best.step:
            reason = (
                f"the best model is of step {step}, which was not saved; these weights are of "
                f"{best}"
            )
            self.emit(BestModelMissing(str(best), reason))

    def close(self) -> None:
        """Close the repository; the daemon commits a cached step after the last save."""
        self._close_step_cache(drops=False)
        self._checkpointer.close()

    def _close_step_cache(self, *, drops: bool) -> None:
        cache, self._step_cache = self._step_cache, None
        if cache is not None:
            if drops:
                cache.drop()
            cache.close()

    @property
    def _saved_parts(self) -> dict[str, Part]:
        """Parts of a checkpoint: all, or the model and its history (``save_only_model``)."""
        if not self._args.save_only_model:
            return self.parts
        return {name: self.parts[name] for name in _MODEL_ONLY}

    def _measure(self) -> None:
        """Wait for the save in flight, as the next save would, and record its duration.

        Raises:
            SaveFailed: The save failed, and ``on_save_failure`` stops training.
        """
        persister = self._checkpointer.in_flight
        if persister is None:
            return
        try:
            self._checkpointer.wait()
        except SaveFailed as error:
            self._continue_without(error)
        else:
            self.timings.record_commit(persister.took_seconds, persister.rested_seconds)

    def _continue_without(self, error: SaveFailed) -> None:
        """Continue after a failed save, unless ``on_save_failure`` stops training."""
        if self._args.on_save_failure == "stop":
            raise error
        self.ledger.reopen()
        self.emit(SaveRetried(error.message))

    def _save_once(self, step: int) -> CheckpointId:
        began_seconds = self.emit.clock.monotonic_seconds()
        try:
            return self._save_now(step)
        finally:
            self.timings.copy_seconds.append(self.emit.clock.monotonic_seconds() - began_seconds)

    def _save_now(self, step: int) -> CheckpointId:
        # `_measure` waited for the previous save, so its rows of the ledger are durable.
        checkpoint_info = self._describe(self.ledger.close)
        return self._checkpointer.save(
            step,
            self._saved_parts,
            checkpoint_info,
            keep=self.best.kept,
            overlap=self._args.save_overlap,
        )

    def _describe(
        self, segment_of: Callable[[CheckpointId, str], Segment | None]
    ) -> CheckpointInfo:
        """Return the content of this step's manifest.

        Args:
            segment_of: Function from the checkpoint and the run to its segment of the ledger.
        """
        engine = self._checkpointer
        segment = segment_of(CheckpointId(engine.generation, self.step), engine.run_id)
        return replace(self._describe_checkpoint(), metrics=self._state.measured(), segment=segment)

    def _name_best(self, checkpoint: CheckpointId) -> None:
        self.best.checkpoint = checkpoint
        self._state.best_model_checkpoint = f"checkpoint-{checkpoint.step}"


@dataclass(slots=True)
class BestCheckpoint:
    """Name of the checkpoint with the best model, which the trainer's state does not contain.

    The name contains the generation. The generation depends on the number of restarts, which may
    differ between equal runs.
    """

    checkpoint: CheckpointId | None = None
    last_before_break: CheckpointId | None = None
    """Last checkpoint before the loss broke; empty while the loss is good."""

    @property
    def kept(self) -> list[CheckpointId]:
        """Checkpoints that garbage collection must keep."""
        return [
            checkpoint for checkpoint in (self.checkpoint, self.last_before_break) if checkpoint
        ]

    def note_broken_loss(
        self, saved: CheckpointId | None, *, begins: bool, is_broken: bool
    ) -> None:
        """Keep the last checkpoint before the loss broke, until the loss is good again.

        Args:
            saved: The last checkpoint.
            begins: Whether the loss was good until now.
            is_broken: Whether the loss is not a number.
        """
        if not is_broken:
            self.last_before_break = None
        elif begins and self.last_before_break is None:
            self.last_before_break = saved

    def state_dict(self) -> dict[str, str]:
        """Return the folder names of the checkpoints; empty text for none."""
        last_before_break = {"sound": str(self.last_before_break)} if self.last_before_break else {}
        return {"checkpoint": str(self.checkpoint) if self.checkpoint else "", **last_before_break}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the names."""
        self.checkpoint = parse_checkpoint(state_dict["checkpoint"])
        self.last_before_break = parse_checkpoint(state_dict.get("sound", ""))


def is_best(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]) -> bool:
    """Return whether the model behind ``metrics`` is the best so far; record it in ``state``.

    Raises:
        ConfigError: ``metric_for_best_model`` is not among the metrics, or is not a number.
    """
    if args.metric_for_best_model is None:
        return False
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    if name not in metrics:
        raise ConfigError(f"`metric_for_best_model` `{name}` is not one of {sorted(metrics)}")
    greater_is_better, value = bool(args.greater_is_better), plain_value(metrics[name])
    if not isinstance(value, int | float):
        raise ConfigError(
            f"`metric_for_best_model` `{name}` is a value of the class `{type(value).__name__}`, "
            "which cannot be compared",
            hint=f"return one number as `{name}` from `compute_metrics`",
        )
    value = float(value) if isinstance(value, bool) else value
    if not improves(value, state.best_metric, greater_is_better=greater_is_better):
        return False
    state.best_metric = value
    if args.save_strategy != "no":
        state.best_global_step = state.global_step
    return True


def improves(value: float, best: float | None, *, greater_is_better: bool) -> bool:
    """Return whether ``value`` strictly beats ``best``; any number beats None."""
    if best is None:
        return value == value  # noqa: PLR0124 - a NaN is not equal to itself, and beats nothing
    return value > best if greater_is_better else value < best
