"""Which pipeline a model was cut for; loads nothing of torch's part about pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn

    from resilient.strategies.pipeline.runtime import PipelinedModel

RANDOM = "stage_random"
"""The part of a checkpoint that holds the random streams of stages."""

_MARK = "_resilient_pipeline"


def pipeline_of(model: nn.Module) -> PipelinedModel | None:
    """Return the pipeline that a user's model was cut for."""
    return cast("PipelinedModel | None", model.__dict__.get(_MARK))


def remember(model: nn.Module, pipelined: PipelinedModel) -> None:
    """Keep the pipeline of a model, which is cut once and for good."""
    # Not as an attribute: it would become a module inside the model.
    model.__dict__[_MARK] = pipelined
