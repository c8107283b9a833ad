"""Events that the trainer emits, and the sinks that receive all events of a process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TextIO, cast

from tqdm.auto import tqdm

from resilient.clock import Timed
from resilient.events import AppendOnlyLog, Emitter, Event, Level, console, json_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from resilient.clock import Clock
    from resilient.distributed.launch_env import World
    from resilient.train.arguments.resume_rules import Change


@dataclass(frozen=True, slots=True)
class MetricsLogged(Event):
    """Numbers were added to the history, or speeds were measured."""

    metrics: Mapping[str, Any]

    def fields(self) -> dict[str, Any]:
        """Return the numbers; a copy would be slow, because numbers are logged often."""
        return {"metrics": self.metrics}

    def message(self) -> str:
        """Format the numbers."""
        return "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.metrics.items()
        )


@dataclass(frozen=True, slots=True)
class ArgumentsChanged(Event):
    """The run continues with other arguments than the attempt that saved."""

    level: ClassVar[Level] = Level.WARNING
    changes: Mapping[str, Change]

    def message(self) -> str:
        """Format each argument with both values and the consequence, one per line."""
        text = (f"\n  {change.shown(name)}" for name, change in self.changes.items())
        return f"arguments differ from the checkpoint's:{''.join(text)}"


@dataclass(frozen=True, slots=True)
class CallbacksGone(Event):
    """A checkpoint has states of callbacks that this run does not have."""

    level: ClassVar[Level] = Level.WARNING
    names: tuple[str, ...]

    def message(self) -> str:
        """Format the callbacks' names."""
        return (
            "the checkpoint holds the state of callbacks that this run does not have: "
            f"{', '.join(self.names)}; pass them to the Trainer to continue as before"
        )


@dataclass(frozen=True, slots=True)
class SpecialTokensAligned(Event):
    """The model's configuration took special tokens from the processing class."""

    level: ClassVar[Level] = Level.WARNING
    tokens: Mapping[str, int]

    def message(self) -> str:
        """Format the tokens."""
        text = ", ".join(f"{name} {value}" for name, value in self.tokens.items())
        return f"the model's configuration takes special tokens of the processing class: {text}"


@dataclass(frozen=True, slots=True)
class ColumnsUnused(Event):
    """A batch has columns that the model's forward does not take, so they are dropped."""

    columns: tuple[str, ...]

    def message(self) -> str:
        """Format the columns."""
        return (
            "not passed to the model, because its forward does not accept them: "
            f"{', '.join(self.columns)}"
        )


@dataclass(frozen=True, slots=True)
class ArithmeticMismatchFound(Event):
    """Hosts compute different bits, and training continues anyway."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "{reason}: the bits of this run depend on the host"
    reason: str


@dataclass(frozen=True, slots=True)
class TokensNotCounted(Event):
    """The tokens of a batch cannot be counted as requested."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "`include_num_input_tokens_seen` cannot count a batch: {reason}"
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryFreed(Event):
    """Memory was nearly full, so unused memory was freed."""

    template: ClassVar[str] = "freed memory: {before:.0%} of it was used, now {after:.0%}"
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class BatchSizeReduced(Event):
    """A rank ran out of memory, so all ranks continue with a smaller batch."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "out of memory with {old} samples per device: the step is repeated with {new}, and no "
        "sample is skipped or repeated"
    )
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class TrainingStarted(Event):
    """The training loop begins or continues."""

    template: ClassVar[str] = (
        "training steps {global_step} to {max_steps}: {samples} samples, {global_batch} per step "
        "on {world_size} ranks, {trainable_parameters} parameters"
    )
    global_step: int
    max_steps: int
    epochs: int
    samples: int
    global_batch: int
    world_size: int
    trainable_parameters: int


@dataclass(frozen=True, slots=True)
class FirstStepEnded(Event):
    """The first step of an attempt is done, so the run has recovered from its interruption."""

    level: ClassVar[Level] = Level.DEBUG
    global_step: int


@dataclass(frozen=True, slots=True)
class PhaseEnded(Event):
    """Work other than a step delayed training: ``saving``, ``evaluating``."""

    level: ClassVar[Level] = Level.DEBUG
    phase: str
    took_seconds: float


def timing(
    phase: str, clock: Clock, emit: Callable[[Event], None], at_least_seconds: float = 0.0
) -> Timed:
    """Return a context that reports its duration as a delay of training, even after an error."""

    def report_duration(took_seconds: float) -> None:
        if took_seconds >= at_least_seconds:
            emit(PhaseEnded(phase, took_seconds))

    return Timed(clock, report_duration)


@dataclass(frozen=True, slots=True)
class TrainingEnded(Event):
    """The training loop has ended and all saves are durable."""

    template: ClassVar[str] = (
        "trained to step {global_step}, loss {training_loss:.4g}, {took_seconds:.1f} s"
    )
    global_step: int
    training_loss: float
    took_seconds: float


@dataclass(frozen=True, slots=True)
class TrainingStopped(Event):
    """All ranks stopped after the same step, on request."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "asked to stop ({reason}): stopped after step {global_step}"
    global_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class UntilStepReached(Event):
    """This agent run reached the step of ``--until-step`` and ends."""

    template: ClassVar[str] = "step {global_step} is saved, and this agent run ends at this step"
    global_step: int


@dataclass(frozen=True, slots=True)
class TrainingRolledBack(Event):
    """The loss broke, so training returned to a checkpoint and skips the data since then.

    Attributes:
        reason: Problem of the loss.
        global_step: Step that was not applied.
        checkpoint: Checkpoint that training returned to.
        skipped: Start and end of the skipped data: epoch, samples, epoch, samples.
        times: Number of rollbacks of the run, including this rollback.
        limit: Maximum number of rollbacks.
    """

    level: ClassVar[Level] = Level.WARNING
    reason: str
    global_step: int
    checkpoint: str
    skipped: list[int]
    times: int
    limit: int

    def message(self) -> str:
        """Format the reason, the checkpoint and the skipped data."""
        epoch, samples, to_epoch, to_samples = self.skipped
        place = f"{samples} to {to_samples} of epoch {epoch}"
        if epoch != to_epoch:
            place = f"{samples} of epoch {epoch} to {to_samples} of epoch {to_epoch}"
        return (
            f"rolled back from step {self.global_step} to {self.checkpoint}: {self.reason}; "
            f"samples {place} are skipped ({self.times} of {self.limit} times)"
        )


@dataclass(frozen=True, slots=True)
class FinalSavePlanned(Event):
    """Destination of a stop's last save, chosen by the remaining time.

    Attributes:
        tier: Name of a :class:`resilient.train.saver.SaveDestination`.
        left_seconds: Time until this process must exit.
        save_p95_seconds: Time until this attempt's saves were durable (p95); None before the
            first.
    """

    global_step: int
    tier: str
    left_seconds: float
    save_p95_seconds: float | None

    def message(self) -> str:
        """Format the choice and its numbers."""
        save_seconds = self.save_p95_seconds
        duration_text = (
            "not measured yet" if save_seconds is None else f"{save_seconds:.2f} s (p95)"
        )
        tier = _TIERS[self.tier]
        return (
            f"step {self.global_step}: {tier}; {self.left_seconds:.1f} s left, a save: "
            f"{duration_text}"
        )


_TIERS = {
    "DURABLE": "saving until the checkpoint is durable",
    "NEAR": "saving only in the near repository",
    "MEMORY": "handing the state to the saver daemon",
    "IN_FLIGHT": "no time for a save, only finishing the save in flight",
}


@dataclass(frozen=True, slots=True)
class SaveRetried(Event):
    """The previous save failed and training continued."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "continued without a checkpoint: {reason}"
    reason: str


@dataclass(frozen=True, slots=True)
class BestModelMissing(Event):
    """Training did not end with the best evaluated model."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "the best model was not loaded: {reason}"
    checkpoint: str
    reason: str


class _AroundBars:
    """Stream that writes above tqdm's bars instead of through them."""

    def write(self, text: str) -> int:
        """Write ``text`` to stderr."""
        tqdm.write(text, file=sys.stderr, end="")
        return len(text)


def metric_lines(path: Path) -> Callable[[Mapping[str, Any], Event], None]:
    """Return a sink that appends metrics as flat JSON objects to ``path`` (``log.jsonl``)."""
    file = AppendOnlyLog(path)

    def sink(record: Mapping[str, Any], event: Event) -> None:
        if not isinstance(event, MetricsLogged):
            return
        flat = {name: record[name] for name in ("at", "generation", "step") if name in record}
        file.append(json.dumps({**flat, **event.metrics}))

    return sink


def open_emitter(clock: Clock, world: World, output: Path, events: Path, threshold: int) -> Emitter:
    """Return this process's emitter: the console, an event file, and rank 0's log.jsonl.

    The console shows events of at least the level ``threshold``.
    """
    sinks = [
        console(threshold, cast("TextIO", _AroundBars())),
        json_lines(events / f"rank-{world.rank}.jsonl"),
    ]
    if world.is_coordinator:
        sinks.append(metric_lines(output / "log.jsonl"))
    return Emitter(clock, tuple(sinks), {"rank": world.rank})
