"""Schedules of torch by their names, over stages whose shapes are known beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from resilient.strategies.pipeline.options import SCHEDULES, micro_batches_fit

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from torch import nn

    from resilient.strategies.pipeline.options import PipelineOptions
    from resilient.strategies.pipeline.trees import Shapes

_CLASSES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "loopedbfs": ScheduleLoopedBFS,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
}


def class_for(options: PipelineOptions, count: int) -> Any:
    """Return the schedule, or the plain one of its kind where so few micro-batches are left."""
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
    """Return what makes the passes of ``count`` micro-batches of the same shapes.

    Args:
        options: of the pipeline.
        stages: this rank's, by number; each returns its tensor, the last one the loss.
        shapes: of the tensors that go from stage to stage.
        count: of micro-batches.
        place: this rank's device, and the ranks of its pipeline.
    """
    device, group = place
    made = [
        PipelineStage(
            module,
            number,
            options.stages,
            device,
            # Told, so that nothing is computed to find out, which would draw random numbers.
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
        made if several else made[0], count, loss_fn=_its_loss, scale_grads=False
    )


def _like(shape: tuple[tuple[int, ...], torch.dtype]) -> torch.Tensor:
    return torch.empty(shape[0], dtype=shape[1], device="meta", requires_grad=True)


def _its_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return what the last stage has returned: the loss already."""
    return output
