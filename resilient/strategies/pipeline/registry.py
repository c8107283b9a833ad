"""Registry of the pipelines of user models, without an import of torch's pipeline part."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch import nn

    from resilient.strategies.pipeline.runtime import PipelinedModel

RANDOM = "stage_random"
"""Part of a checkpoint with the random generators of stages."""

_MARK = "_resilient_pipeline"


def pipeline_of(model: nn.Module) -> PipelinedModel | None:
    """Return the pipeline of a user's model, None if there is none."""
    return cast("PipelinedModel | None", model.__dict__.get(_MARK))


def remember(model: nn.Module, pipelined: PipelinedModel) -> None:
    """Record the pipeline of a model permanently."""
    # Not as an attribute: it would become a module inside the model.
    model.__dict__[_MARK] = pipelined
