"""Runtime of a pipeline: rank placement, random streams, schedules, training and evaluation.

Training uses torch's pipeline schedules. The shapes of the tensors between stages are computed
before torch creates the stages. Evaluation runs one stage after the other, without a schedule.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.utils._pytree import tree_flatten, tree_unflatten

from resilient.errors import ConfigError, ResilientError
from resilient.state_dict.pipeline import PipelineModel
from resilient.state_dict.snapshot import Part
from resilient.strategies.parallelism_options import SCHEDULES, micro_batches_fit
from resilient.strategies.pipeline.partition import StageComplete, is_fake

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.strategies.parallelism_options import PipelineOptions
    from resilient.strategies.pipeline.partition import Shapes, StageEntry, StageShapes

    Run = Callable[[nn.Module], Any]
    """Function that calls a model with one micro-batch; in training, the result is the loss."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRank:
    """Place of this rank in its pipeline.

    Attributes:
        device: Device of this rank.
        number: Position in its pipeline.
        pipeline: Ranks of its pipeline, in order.
        pipeline_group: Process group of its pipeline.
        peers: Ranks at the same position in all pipelines.
        peers_group: Process group of the peers; None if this rank is alone.
    """

    device: torch.device
    number: int
    pipeline: tuple[int, ...]
    pipeline_group: dist.ProcessGroup
    peers: tuple[int, ...]
    peers_group: dist.ProcessGroup | None

    @property
    def writes(self) -> bool:
        """True if this rank writes the tensors that are equal on all ranks of its stages."""
        return dist.get_rank() == self.peers[0]

    def holder(self, stage: int) -> int:
        """Return the rank that has a stage of this pipeline."""
        return self.pipeline[stage % len(self.pipeline)]

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks of the pipeline. Collective.

        Only for ranks of one job: received values are unpickled.
        """
        values: list[Any] = [None] * len(self.pipeline)
        dist.all_gather_object(values, value, group=self.pipeline_group)
        return values


class StageRandom:
    """Random stream of a stage's passes, a per-rank Stateful.

    Ranks of one pipeline share all other random numbers, so that they make equal batches of the
    same samples. The layers of each rank draw from its own stream.

    Args:
        place: Place of this rank; ranks that share a stage draw the same numbers.
    """

    def __init__(self, place: PipelineRank) -> None:
        self._device = place.device
        seed = (torch.initial_seed() + 1_000_003 * (place.number + 1)) % 2**63
        with self._swapped(None):
            torch.manual_seed(seed)
            self._states = self._read()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream inside the context, not from the process's generators."""
        with self._swapped(self._states):
            try:
                yield
            finally:
                self._states = self._read()

    @contextmanager
    def _swapped(self, states: dict[str, torch.Tensor] | None) -> Iterator[None]:
        outer_state = self._read()
        if states is not None:
            self._write(states)
        try:
            yield
        finally:
            self._write(outer_state)

    def _read(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _write(self, states: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the generators' states, by kind of device."""
        return self._states

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restore the generators."""
        self._states = {**self._states, **state_dict}


_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "loopedbfs": ScheduleLoopedBFS,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}


def class_for(options: PipelineOptions, count: int) -> Any:
    """Return the schedule class, or a simpler class if there are too few micro-batches."""
    if micro_batches_fit(options, count):
        return _CLASSES[options.schedule]
    return ScheduleLoopedBFS if SCHEDULES[options.schedule] else ScheduleGPipe


def make_schedule(
    options: PipelineOptions,
    stages: Mapping[int, nn.Module],
    shapes: Shapes,
    count: int,
    place: tuple[torch.device, dist.ProcessGroup],
) -> Any:
    """Create the schedule of ``count`` micro-batches of the same shapes.

    Args:
        options: Options of the pipeline.
        stages: Stages of this rank by number; each returns its tensor, the last one the loss.
        shapes: Shapes of the tensors between stages.
        count: Number of micro-batches.
        place: Place of this rank.
    """
    device, group = place
    pipeline_stages = [
        PipelineStage(
            module,
            number,
            options.stages,
            device,
            # Pass the shapes explicitly, because torch would otherwise compute them and draw random
            # numbers.
            input_args=_like(shapes[number - 1]) if number else torch.empty(1, device="meta"),
            output_args=_like(shapes[number])
            if number < len(shapes)
            else torch.empty((), device="meta"),
            group=group,
        )
        for number, module in stages.items()
    ]
    several = SCHEDULES[options.schedule]
    return class_for(options, count)(
        pipeline_stages if several else pipeline_stages[0],
        count,
        loss_fn=_output_as_loss,
        scale_grads=False,
    )


def _like(shape: tuple[tuple[int, ...], torch.dtype]) -> torch.Tensor:
    return torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=True)


def _output_as_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the output of the last stage, which is already the loss."""
    return output


_SCHEDULES_MAX = 4


class Stage(nn.Module):
    """One stage of a pipeline, which runs its part of the model's forward pass.

    Args:
        number: Number of the stage.
        tree: Model with stand-ins for the modules of other stages.
        entry: First module of the stage; None in the first stage.
        whole: User's model; its training mode applies to the stage.
    """

    def __init__(
        self, number: int, tree: nn.Module, entry: StageEntry | None, whole: nn.Module
    ) -> None:
        super().__init__()
        self.tree = tree
        self.number = number
        self.shapes: Shapes = ()
        self.runs: Sequence[Run] = ()
        # Do not register these modules, because the stage would then own parameters of other
        # stages.
        self.__dict__["_entry"] = entry
        self.__dict__["_whole"] = whole

    def forward(self, *tensors: torch.Tensor, nth: torch.Tensor) -> Any:
        """Return the tensor for the next stage, or the run's result in the last stage.

        Args:
            tensors: Tensor from the previous stage; none in the first stage.
            nth: Number of the micro-batch, as a tensor of one element.

        Raises:
            ConfigError: The model cannot be cut at these modules.
        """
        entry, full_model = self.__dict__["_entry"], self.__dict__["_whole"]
        if self.tree.training != full_model.training:
            self.tree.train(full_model.training)
        if entry is not None:
            entry.waiting = tensors[0]
        try:
            output = self.runs[int(nth)](self.tree)
        except StageComplete as stage_end:
            return self._checked(stage_end.tensor)
        if self.number < len(self.shapes):
            raise ConfigError(
                f"the model's forward pass ended in stage {self.number} of the pipeline, before "
                "it reached the next stage"
            )
        if is_fake(output):
            raise ConfigError(_NEEDS_MORE)
        return output

    def _checked(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_fake(tensor):
            raise ConfigError(_NEEDS_MORE)
        planned_output = self.shapes[self.number]
        if (tuple(tensor.shape), tensor.dtype) != planned_output:
            raise ConfigError(
                f"stage {self.number} of the pipeline made {tensor.dtype} {list(tensor.shape)}, "
                f"but the shapes of its batch imply {planned_output[1]} {list(planned_output[0])}: "
                "shapes must not depend on values"
            )
        return tensor.contiguous()


_NEEDS_MORE = (
    "a later stage of the pipeline uses a tensor of an earlier stage besides the one that is sent "
    "(a skip connection, or a weight used twice): cut the model elsewhere"
)


class PipelinedModel(nn.Module):
    """A model with some stages on this rank; a call evaluates the model.

    Args:
        whole: The user's model; parameters of other ranks are on the meta device.
        stages: Stages of this rank by number.
        plan: Planner of shapes.
        options: Options of the pipeline.
        place: Place of this rank.

    Attributes:
        beside: Names of saved tensors that every stage has.
        units: Name of a module -> the stage that has all of its contents.
    """

    beside: tuple[str, ...] = ()
    units: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        whole: nn.Module,
        stages: Mapping[int, Stage],
        plan: StageShapes,
        options: PipelineOptions,
        place: PipelineRank,
    ) -> None:
        super().__init__()
        self.whole = whole
        self.held = nn.ModuleList(stages.values())
        self.stages = dict(stages)
        self.options = options
        self.place = place
        self.random = StageRandom(place)
        self.__dict__["_plan"] = plan
        self._schedules: dict[tuple[int, Shapes], Any] = {}

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's outputs on every rank of the pipeline. Collective, without gradients.

        Outputs other than tensors and plain values, such as caches, become None.

        Raises:
            ConfigError: Gradients are enabled in training mode, or the model cannot be cut here.
        """
        if torch.is_grad_enabled() and self.whole.training:
            raise ConfigError(
                "a model in a pipeline is not trained by a call: the schedule runs its passes, "
                "from `compute_loss` of the trainer"
            )

        def run(model: nn.Module) -> Any:
            return model(*inputs, **kwargs)

        shapes = self._shapes(run, (inputs, kwargs))
        outputs: Any = None
        for number in range(self.options.stages):
            if number in self.stages:
                outputs = self._evaluate(self.stages[number], run, shapes, outputs)
        return self._broadcast_outputs(outputs)

    def align(self) -> None:
        """Broadcast buffers from the first of the ranks that have the same stages. Collective."""
        place = self.place
        if place.peers_group is None:
            return
        for buffer in self.whole.buffers():
            if not buffer.is_meta:
                dist.broadcast(buffer, place.peers[0], group=place.peers_group)

    def part(self) -> Part:
        """Return the part that is saved and loaded."""
        # Every stage has the tensors outside units. Only the first stage writes these tensors.
        excluded_names = self.beside if self.place.number else ()
        return Part(PipelineModel(self.whole, writes=self.place.writes, but=excluded_names))

    def gathered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor of the model on the CPU of every rank. Collective.

        Args:
            name: Name in the user's model.
            tensor: This rank's part, which may be empty.
        """
        stages = (stage for unit, stage in self.units.items() if name.startswith(f"{unit}."))
        source = self.place.holder(next(stages, 0))
        if tensor.is_meta:
            full_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.place.device)
        else:
            full: Any = tensor.detach()
            full_tensor = full.full_tensor() if hasattr(full, "full_tensor") else full.clone()
        dist.broadcast(full_tensor, source, group=self.place.pipeline_group)
        return full_tensor.cpu()

    def _evaluate(self, stage: Stage, run: Run, shapes: Shapes, before: Any) -> Any:
        """Receive a stage's input, run the stage, and send its output."""
        place, number = self.place, stage.number
        own_holder = place.holder(number)
        tensors: tuple[torch.Tensor, ...] = ()
        if number:
            tensors = (before,)
            if place.holder(number - 1) != own_holder:
                shape, dtype = shapes[number - 1]
                tensors = (torch.empty(shape, dtype=dtype, device=place.device),)
                dist.recv(tensors[0], place.holder(number - 1), group=place.pipeline_group)
        stage.shapes, stage.runs = shapes, (run,)
        output = stage(*tensors, nth=torch.zeros(1, dtype=torch.int64))
        stage.runs = ()
        if number < len(shapes) and place.holder(number + 1) != own_holder:
            dist.send(output, place.holder(number + 1), group=place.pipeline_group)
        return output

    def _broadcast_outputs(self, outputs: Any) -> Any:
        """Broadcast the last stage's outputs to every rank."""
        place, last_stage = self.place, self.options.stages - 1
        leaves, spec = tree_flatten(outputs if last_stage in self.stages else None)
        outline: list[Any] = [[_outline(leaf) for leaf in leaves], spec]
        dist.broadcast_object_list(outline, place.holder(last_stage), group=place.pipeline_group)
        shapes = []
        for nth, leaf in enumerate(outline[0]):
            if not isinstance(leaf, _Outline):
                shapes.append(leaf)
                continue
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=place.device)
            if last_stage in self.stages:
                tensor = leaves[nth].contiguous()
            dist.broadcast(tensor, place.holder(last_stage), group=place.pipeline_group)
            shapes.append(tensor)
        return tree_unflatten(shapes, outline[1])

    def passes(self, runs: Sequence[Run], batches: Sequence[Any]) -> list[torch.Tensor]:
        """Run the passes of a step, and accumulate gradients on this rank. Collective.

        Micro-batches of unequal shapes, here or in another pipeline, run one by one.

        Args:
            runs: One function for each micro-batch.
            batches: Batches with the shapes.

        Returns:
            The loss of each micro-batch, on every rank of the pipeline.
        """
        # A save must not change the start of the next step.
        self.align()
        with self.random.drawing():
            shapes = [self._shapes(*pair) for pair in zip(runs, batches, strict=True)]
            has_one_shape = self._agree(alike=len(set(shapes)) == 1)
            count = len(runs)
            groups = [range(count)] if has_one_shape else [range(n, n + 1) for n in range(count)]
            losses: list[torch.Tensor] = []
            for group in groups:
                losses += self._step([runs[nth] for nth in group], shapes[group[0]])
        return self._broadcast_losses(losses, count)

    def _shapes(self, run: Run, batch: Any) -> Shapes:
        plan: StageShapes = self.__dict__["_plan"]
        if plan.tree.training != self.whole.training:
            plan.tree.train(self.whole.training)
        return plan.shapes(run, batch)

    def _agree(self, *, alike: bool) -> bool:
        """Return whether all pipelines have equal micro-batches.

        Every pipeline then makes the same number of reductions.
        """
        if self.place.peers_group is None:
            return alike
        flags = torch.tensor([alike], dtype=torch.int32, device=self.place.device)
        dist.all_reduce(flags, dist.ReduceOp.MIN, group=self.place.peers_group)
        return bool(flags.item())

    def _step(self, runs: Sequence[Run], shapes: Shapes) -> list[torch.Tensor]:
        count, losses = len(runs), list[torch.Tensor]()
        schedule = self._schedule(count, shapes)
        for stage in self.stages.values():
            stage.shapes, stage.runs = shapes, runs
        has_last_stage = self.options.stages - 1 in self.stages
        stage_inputs = (torch.zeros(count, device=self.place.device),) if 0 in self.stages else ()
        try:
            schedule.step(
                *stage_inputs,
                target=torch.zeros(count) if has_last_stage else None,
                losses=losses,
                return_outputs=False,
                nth=torch.arange(count),
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, ResilientError):
                raise error.__cause__ from None
            raise
        finally:
            for stage in self.stages.values():
                stage.runs = ()
        return losses

    def _schedule(self, count: int, shapes: Shapes) -> Any:
        schedules = self._schedules
        if (count, shapes) not in schedules:
            if len(schedules) >= _SCHEDULES_MAX:
                del schedules[next(iter(schedules))]
            place = (self.place.device, self.place.pipeline_group)
            schedules[count, shapes] = make_schedule(
                self.options, self.stages, shapes, count, place
            )
        return schedules[count, shapes]

    def _broadcast_losses(self, losses: list[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Broadcast the losses of the last stage to every rank of the pipeline."""
        all_losses = torch.zeros(count, dtype=torch.float64, device=self.place.device)
        if losses:
            all_losses.copy_(torch.stack([loss.detach() for loss in losses]))
        source = self.place.holder(self.options.stages - 1)
        dist.broadcast(all_losses, source, group=self.place.pipeline_group)
        return list(all_losses)


@dataclass(frozen=True, slots=True)
class _Outline:
    """Shape and dtype of a tensor among the outputs, sent before its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Outline(tuple(value.shape), value.dtype)
    return value if isinstance(value, bool | int | float | str) else None
