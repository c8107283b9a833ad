"""The schedules as functions, with the field's names and arguments, for a loop of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from resilient.errors import ConfigError
from resilient.train.arguments.words import did_you_mean
from resilient.train.schedules.shapes import SHAPES, Span

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int = 0,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
    *,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a schedule by its name in ``lr_scheduler_type``, as a multiple of the given rates.

    Its state is the step alone, so it is saved and resumed without pickle.

    Args:
        name: of a schedule that needs no metric.
        optimizer: its groups' rates are those that are scaled.
        num_warmup_steps: optimizer steps of warm-up.
        num_training_steps: optimizer steps of the run.
        scheduler_specific_kwargs: of this schedule, as in ``lr_scheduler_kwargs``.
        last_epoch: the step to go on from; -1 begins.

    Raises:
        ConfigError: there is no such schedule.
    """
    name = str(getattr(name, "value", name))
    if name not in SHAPES:
        raise ConfigError(
            f"`{name}` is no schedule{did_you_mean(name, SHAPES)}", hint=f"use {', '.join(SHAPES)}"
        )
    span = Span(num_warmup_steps, num_training_steps, optimizer.defaults["lr"])
    shape, options = SHAPES[name], scheduler_specific_kwargs or {}

    # A plain function: LambdaLR then keeps it out of its state.
    def factor(step: int) -> float:
        value: float = shape(step, span, **options)
        return value

    return LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LRScheduler:
    """Return the rate as it is."""
    return get_scheduler("constant", optimizer, last_epoch=last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LRScheduler:
    """Return a linear rise, then the rate as it is."""
    return get_scheduler("constant_with_warmup", optimizer, num_warmup_steps, last_epoch=last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LRScheduler:
    """Return a linear rise, then a linear fall to 0."""
    return get_scheduler(
        "linear", optimizer, num_warmup_steps, num_training_steps, last_epoch=last_epoch
    )


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a linear rise, then ``num_cycles`` waves of a cosine, by default half a one to 0."""
    return get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps,
        num_training_steps,
        {"num_cycles": num_cycles},
        last_epoch=last_epoch,
    )


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: int = 1,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a linear rise, then ``num_cycles`` half waves of a cosine, each from the top."""
    return get_scheduler(
        "cosine_with_restarts",
        optimizer,
        num_warmup_steps,
        num_training_steps,
        {"num_cycles": num_cycles},
        last_epoch=last_epoch,
    )


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a linear rise, then a fall to the rate ``lr_end`` along a power."""
    return get_scheduler(
        "polynomial",
        optimizer,
        num_warmup_steps,
        num_training_steps,
        {"lr_end": lr_end, "power": power},
        last_epoch=last_epoch,
    )


def get_inverse_sqrt_schedule(
    optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
) -> LRScheduler:
    """Return a linear rise, then a fall with the root of the step."""
    return get_scheduler(
        "inverse_sqrt",
        optimizer,
        num_warmup_steps,
        scheduler_specific_kwargs={"timescale": timescale},
        last_epoch=last_epoch,
    )
