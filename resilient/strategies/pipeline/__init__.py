"""Pipeline parallelism: a model is cut into consecutive stages, each on its own ranks.

An import of this file does not load torch's pipeline package.
"""

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
    # Do not store the pipeline as an attribute, because it would become a submodule of the model.
    model.__dict__[_MARK] = pipelined
