"""Objects of one ``train()`` call, and the passes of a step through a pipeline."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.errors import ConfigError, Preempted, ResilientError
from resilient.strategies.module_wrapper import find_redirect
from resilient.strategies.pipeline import pipeline_of
from resilient.train.arguments.arguments import open_names
from resilient.train.arguments.json_values import json_value
from resilient.train.data.loader_workers import end_persistent_workers, end_workers, is_persistent
from resilient.train.data.ordering import draw_for_epoch
from resilient.train.data.streaming import StreamLoader
from resilient.train.events import (
    FirstStepEnded,
    TrainingStarted,
    TrainingStopped,
    UntilStepReached,
)
from resilient.train.fast_asdict import CachedAsdict
from resilient.train.saver import SaveDestination

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

    from resilient.events import Event
    from resilient.strategies.base import Strategy
    from resilient.strategies.pipeline.runtime import PipelinedModel
    from resilient.train.arguments import TrainingArguments
    from resilient.train.auto_batch_size import AutoBatchSize
    from resilient.train.canonical_reduction import CanonicalPasses
    from resilient.train.data.sampler import BatchLayout, DataCursor, ResumableSampler
    from resilient.train.loss_guard import LossGuard
    from resilient.train.meters import Meters, UsageCounter
    from resilient.train.preemption import StopCoordinator
    from resilient.train.sample_ledger import Ledger
    from resilient.train.saver import CheckpointSaver
    from resilient.train.state import TrainerState
    from resilient.train.trainer import Trainer
    from resilient.train.trainer_hooks import TrainerHooks

# Every step waits for a copy, and the wait is mostly zero. Only longer waits are reported.
_STALL_SECONDS = 0.01


def set_seed(seed: int) -> None:
    """Seed the global random numbers of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from the global stream
    torch.manual_seed(seed)


@dataclass(slots=True)
class TrainingRun:
    """Objects of one training, all created before any state is restored.

    Attributes:
        model: Model as the strategy wrapped it.
        parameters: Parameters that are trained at the start, in the model's order.
        all_parameters: All parameters of the model; a callback may unfreeze some later.
        cursor: Position in the data.
        layout: Batch layout of an epoch.
        counter: Counter of tokens and operations.
        gate: Stop coordinator, queried before each step.
        accumulation: Micro-batches per step and rank.
        exit_barrier: Waits until no other rank needs the stores that this rank serves.
        scheduled_steps: Run length for which the schedule was made.
        batch_size_search: Search for a batch size that fits into memory, if requested.
        pipeline: Runs the passes of a step, if the model is split into stages.
        canonical_passes: Runs the passes of a step, if gradients are reduced in one fixed order.
        loss_guard: Guard that checks the loss of each step.
        turns_ahead: Number of turns of the gate beyond the number of steps, because steps were
            repeated.
        until_step: Step after which this agent run ends although training is not finished; 0: none.
        ends_here: Whether ``until_step`` is reached.
        is_over: Whether all ranks ended the training together without a failure.
        is_fresh: Whether no step is finished yet.
    """

    strategy: Strategy
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    loader: DataLoader[Any] | StreamLoader
    cursor: DataCursor
    layout: BatchLayout
    meters: Meters
    counter: UsageCounter
    saver: CheckpointSaver
    gate: StopCoordinator
    accumulation: int
    exit_barrier: Callable[[], None]
    scheduled_steps: int
    loss_guard: LossGuard
    batch_size_search: AutoBatchSize | None = None
    pipeline: PipelinedModel | None = None
    canonical_passes: CanonicalPasses | None = None
    turns_ahead: int = 0
    until_step: int = 0
    ends_here: bool = False
    is_over: bool = False
    is_fresh: bool = True
    parameters: list[nn.Parameter] = field(init=False)
    all_parameters: list[nn.Parameter] = field(init=False)
    _batches: Iterator[Any] | None = None

    def __post_init__(self) -> None:
        self.all_parameters = list(self.model.parameters())
        self.parameters = [
            parameter for parameter in self.all_parameters if parameter.requires_grad
        ]

    @property
    def trained_numbers(self) -> int:
        """Number of trained values, on all ranks."""
        detour = find_redirect(self.model)
        if detour is not None:
            return detour.numbers
        return sum(
            getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.parameters
        )

    def started(self, state: TrainerState, ranks: int) -> TrainingStarted:
        """Return the event that reports the start of the loop on ``ranks`` ranks."""
        return TrainingStarted(
            state.global_step,
            state.max_steps,
            state.num_train_epochs,
            self.cursor.size,
            self.step_samples,
            ranks,
            self.trained_numbers,
        )

    @property
    def ledger(self) -> Ledger:
        """Ledger of the samples of each step."""
        return self.saver.ledger

    @property
    def step_samples(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.layout.round_samples * self.accumulation

    def batches(self, *, begins: bool) -> Iterator[Any]:
        """Return this rank's micro-batches from the cursor on; start no worker if there are none.

        Args:
            begins: Whether the epoch begins, rather than continues.
        """
        if begins:
            draw_for_epoch(self.cursor)
        if not is_persistent(self.loader):
            end_workers(self._batches)
        batches: Iterator[Any] = iter(self.loader) if self.rounds_left() else iter(())
        self._batches = batches
        return batches

    def wait_for_copy(self, timing: Callable[..., AbstractContextManager[None]]) -> None:
        """Wait until a save has copied the state that the update changes; report a long wait."""
        with timing("saving", _STALL_SECONDS):
            self.saver.before_update()
        if self.saver.caches_next_step():
            # Start the reduction after before_update(). Its sum then shows, without a wait, that
            # every
            # rank has cached the previous step completely.
            self.meters.begin_mean(self.saver.near_sums)

    def may_begin(self, step: int) -> bool:
        """Return whether to begin a step: the agent run continues, and no stop was agreed."""
        # The first condition is the same on all ranks, independent of their gates.
        self.ends_here = 0 < self.until_step < step
        return not self.ends_here and self.gate.enter(step + self.turns_ahead)

    def rounds_left(self) -> int:
        """Return the number of rounds left in the epoch."""
        return self.layout.rounds_after(self.cursor.samples)

    def settle(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Wait for the save in flight; the deadline of a stop request still applies.

        Raises:
            SaveFailed: The save failed; another error, if any, takes precedence.
        """
        try:
            self.saver.wait()
        except ResilientError as save_error:
            if error is None:
                raise
            error.add_note(f"the save in flight failed too: {save_error}")

    def leave(self, step: int, save: Callable[[], None], emit: Callable[[Event], None]) -> NoReturn:
        """Save at the agreed step in the tier that the remaining time allows, and exit.

        Raises:
            Preempted: The step is saved as far as time allowed.
            SaveFailed: The save could not be made durable.
            SystemExit: Code 0; the save is durable, and this agent run ends at this step.
        """
        if self.ends_here:
            self._end_launch(step, save, emit)
        tier = self.saver.choose_tier(self.gate)
        if tier is not SaveDestination.IN_FLIGHT:
            save()
        self.saver.leave(self.gate, tier)
        request = self.gate.request
        reason = request.reason if request else "unknown"
        emit(TrainingStopped(step, reason))
        self.is_over = True
        raise Preempted(f"training stopped after step {step}: {reason}", hint="start it again")

    def _end_launch(
        self, step: int, save: Callable[[], None], emit: Callable[[Event], None]
    ) -> NoReturn:
        save()
        self.saver.wait()
        emit(UntilStepReached(step))
        self.is_over = True
        raise SystemExit(0)

    def close(self) -> None:
        """Close the repository and the gate; if training is over, wait at the exit barrier."""
        with ExitStack() as closing:
            closing.callback(self._end_loading)
            closing.callback(self.gate.close)
            self.saver.close()
        if self.is_over:
            self.exit_barrier()

    def _end_loading(self) -> None:
        """End the loader's processes, which an error's traceback would otherwise keep alive."""
        end_workers(self._batches)
        end_persistent_workers(self.loader)
        if isinstance(self.loader, StreamLoader):
            self.loader.close()

    def end_epoch(self, *, cut_short: bool) -> None:
        """Mark the epoch's end as handled; advance if the epoch is complete or abandoned."""
        cursor = self.cursor
        cursor.is_open = False
        if cut_short or not self.rounds_left():
            if cursor.samples < cursor.size or (cut_short and not cursor.size):
                self.ledger.leave_out(cursor, "cut short" if cut_short else "incomplete round")
            cursor.next_epoch()

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add the loss of a micro-batch, already divided by the micro-batches of its step."""
        self.loss_guard.add(loss)
        self.meters.add_loss(loss)

    def judge_step(self, grad_norm: torch.Tensor, *, expects_infinite: bool) -> None:
        """Measure the gradients of a step and judge it before its update. Collective.

        Args:
            grad_norm: Norm before clipping, a scalar.
            expects_infinite: Whether infinite gradients only reduce the loss scale.

        Raises:
            LossDiverged: The loss broke. All ranks raise it.
        """
        self.meters.end_step(grad_norm, self.optimizer.param_groups[0]["lr"])
        self.loss_guard.judge(None if expects_infinite else grad_norm)

    def end_step(self, hooks: Trainer, start: int, *, updated: bool) -> None:
        """Record the samples of a step. Collective at the steps that read losses.

        Args:
            hooks: Trainer of the step.
            start: Samples of the epoch that were consumed before the step.
            updated: Whether the step changed the model.
        """
        note, losses = self.ledger.end_step, self.meters.take_step()
        step, rounds = hooks.state.global_step, hooks.current_gradient_accumulation_steps
        if self.is_fresh:
            self.is_fresh = False
            hooks._emit_on_first_rank(FirstStepEnded(step))  # noqa: SLF001 - emits once per rank group
        if note(step, start, self.cursor, self.layout, rounds, losses, updated=updated):
            self._settle_losses()

    def settle_for_saving(self, state: TrainerState, callbacks: dict[str, Any]) -> None:
        """Bring all state that a checkpoint contains up to this step. Collective."""
        self.strategy.align(self.model)
        self.settle_counts()
        state.stateful_callbacks = callbacks

    def cache_step(self, state: TrainerState, callbacks: Callable[[], dict[str, Any]]) -> None:
        """Cache this step in memory if it is due; this is not a checkpoint yet. Collective."""
        if self.saver.caches_this_step():
            self.settle_for_saving(state, callbacks())
            self.saver.cache_step()

    def settle_counts(self) -> None:
        """Read device-side counters before they are saved. Collective."""
        self.counter.settle()
        self._settle_losses()

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics to log, and report a broken loss. Collective."""
        episodes, values = self.loss_guard.episodes, self.meters.take()
        loss_events = episodes.log(self.saver.step, values["loss"], values["grad_norm"])
        self.saver.note_broken_loss(loss_events, is_broken=episodes.is_broken)
        return values

    def _settle_losses(self) -> None:
        episodes, losses = self.loss_guard.episodes, self.ledger.settle(self.meters.means)
        loss_events = episodes.read(self.saver.step, losses)
        self.saver.note_broken_loss(loss_events, is_broken=episodes.is_broken)


BEGAN_FROM, BEGAN_DIGEST = "began_from", "began_digest"
"""Keys of a manifest's data: folder of another trainer from which the run began, and its digest."""


class CheckpointInfoBuilder:
    """Builder of the description that each saved or cached step of a run gets.

    Args:
        args: Arguments of the run.
        sampler: Sampler of the run, whose batch layout may change.
        strategy: Name of the parallel strategy.
    """

    def __init__(self, args: TrainingArguments, sampler: ResumableSampler, strategy: str) -> None:
        self._args = args
        self._sampler = sampler
        self._strategy = strategy
        self._config = CachedAsdict(json_value)

    def checkpoint_info(self) -> CheckpointInfo:
        """Return the description of a checkpoint made now."""
        args, cursor, layout = self._args, self._sampler.cursor, self._sampler.layout
        data = {
            "epoch": cursor.epoch,
            "samples": cursor.samples,
            "seed": cursor.seed,
            "dataset_size": cursor.size,
            "global_batch": layout.round_samples * args.gradient_accumulation_steps,
        }
        if cursor.origin and "path" in cursor.origin:
            data |= {BEGAN_FROM: cursor.origin["path"], BEGAN_DIGEST: cursor.origin["digest"]}
        config = self._config.of(args, open_names(cast("Any", type(args))))
        return CheckpointInfo(config=config, data=data, strategy=self._strategy)


def pipeline_for(hooks: TrainerHooks) -> PipelinedModel | None:
    """Return the pipeline of a trainer's model; None if the model is not cut.

    Raises:
        ConfigError: The trainer overrides ``training_step``.
    """
    pipelined = pipeline_of(hooks.model)
    if pipelined is not None and hooks.has_own_training_step:
        raise ConfigError(
            f"`{type(hooks).__name__}.training_step` runs the passes of one micro-batch, but a "
            "pipeline runs those of a whole step together: override `compute_loss` instead"
        )
    return pipelined


def pass_through(
    trainer: Trainer, run: TrainingRun, samples: Sequence[Any], counted: tuple[torch.Tensor, ...]
) -> None:
    """Run forward and backward of a step, then count its micro-batches. Collective.

    Every stage calls ``compute_loss``; in all but the last stage the call ends at the cut.

    Args:
        trainer: Trainer with a pipeline model.
        run: Run of the trainer.
        samples: Micro-batches from the loader.
        counted: Number of labels of the whole step, if they are counted.
    """
    assert run.pipeline is not None  # noqa: S101 - narrows the type for mypy
    batches = [trainer._prepare_inputs(sample) for sample in samples]  # noqa: SLF001 - Transformers' name
    runs = [partial(_loss, trainer, batch, counted) for batch in batches]
    losses = run.pipeline.passes(runs, batches)
    for nth, (inputs, loss) in enumerate(zip(samples, losses, strict=True), 1):
        run.add_loss(loss)
        if run.counter.is_on:
            run.counter.add(inputs)
        run.cursor.advance(run.layout)
        if nth < len(samples):
            trainer.callback_handler.fire("on_substep_end")


def _loss(hooks: TrainerHooks, batch: Any, counted: tuple[torch.Tensor, ...], model: Any) -> Any:
    return hooks.step_loss(model, batch, *counted)
