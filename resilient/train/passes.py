"""The passes of a step through a pipeline, of all micro-batches together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.strategies.pipeline.known import pipeline_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from resilient.strategies.pipeline.running import Pipelined
    from resilient.train.run import Run
    from resilient.train.surface.hooks import TrainerHooks
    from resilient.train.surface.stepping import LossHooks
    from resilient.train.trainer import Trainer


def pipeline_for(hooks: TrainerHooks) -> Pipelined | None:
    """Return the pipeline of a trainer's model, None if it is in one piece.

    Raises:
        ConfigError: the trainer makes steps in a way of its own.
    """
    pipelined = pipeline_of(hooks.model)
    if pipelined is not None and hooks.has_own_training_step:
        raise ConfigError(
            f"`{type(hooks).__name__}.training_step` makes the passes of one micro-batch, and a "
            "pipeline makes those of a whole step together: override `compute_loss` instead"
        )
    return pipelined


def pass_through(
    trainer: Trainer, run: Run, samples: Sequence[Any], counted: tuple[torch.Tensor, ...]
) -> None:
    """Make forward and backward passes of a step, then count its micro-batches. Collective.

    Every stage calls ``compute_loss``; all but the last leave it where the model is cut.

    Args:
        trainer: whose model is in a pipeline.
        run: of it.
        samples: micro-batches as the loader made them.
        counted: labels of the whole step, if they are counted.
    """
    assert run.pipeline is not None  # noqa: S101 - for mypy
    batches = [trainer._prepare_inputs(one) for one in samples]  # noqa: SLF001 - the field's name
    runs = [partial(_loss, trainer, one, counted) for one in batches]
    losses = run.pipeline.passes(runs, batches)
    for nth, (inputs, loss) in enumerate(zip(samples, losses, strict=True), 1):
        run.add_loss(loss)
        if run.counter.is_on:
            run.counter.add(inputs)
        run.cursor.advance(run.deal)
        if nth < len(samples):
            trainer.callback_handler.fire("on_substep_end")


def _loss(hooks: LossHooks, batch: Any, counted: tuple[torch.Tensor, ...], model: Any) -> Any:
    return hooks.step_loss(model, batch, *counted)
