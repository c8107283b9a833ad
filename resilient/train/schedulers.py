"""Learning-rate schedules as closed forms of the step.

Each returns the factor on the base rate at ``step`` (0 before the first optimizer step), so a
schedule has no state but the step and can be resumed anywhere. ``warmup`` and ``total`` are
counted in optimizer steps. The forms are those of Transformers (optimization.py).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from resilient.errors import ConfigError
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from resilient.train.arguments import TrainingArguments


def constant(step: int, warmup: int, total: int) -> float:  # noqa: ARG001 - one shape for all
    """Return 1 at every step."""
    return 1.0


def constant_with_warmup(step: int, warmup: int, total: int) -> float:  # noqa: ARG001
    """Return ``step / warmup`` during the warm-up, then 1."""
    return step / max(1, warmup) if step < warmup else 1.0


def linear(step: int, warmup: int, total: int) -> float:
    """Return ``step / warmup``, then ``(total - step) / (total - warmup)`` down to 0."""
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup))


def cosine(step: int, warmup: int, total: int) -> float:
    """Return ``step / warmup``, then ``(1 + cos(pi * p)) / 2``.

    ``p = (step - warmup) / (total - warmup)`` goes from 0 to 1 (half a cosine wave).
    """
    if step < warmup:
        return step / max(1, warmup)
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
}


def create_scheduler(args: TrainingArguments, optimizer: Optimizer, total: int) -> LambdaLR:
    """Return the scheduler that ``args`` names over ``total`` steps."""
    shape = SCHEDULES[args.lr_scheduler_type]
    warmup = absolute_steps(args.warmup_steps, total)

    # A plain function: LambdaLR then keeps it out of its state, which so needs no pickle.
    def factor(step: int) -> float:
        return shape(step, warmup, total)

    return LambdaLR(optimizer, factor)


def require_stepwise(scheduler: LRScheduler) -> LRScheduler:
    """Return the scheduler.

    Raises:
        ConfigError: it waits for a metric, and the loop steps schedulers after every step.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "cannot train with `ReduceLROnPlateau`: its `step` needs a metric, and a scheduler is "
            "stepped after every optimizer step; use one that is a function of the step, or call "
            "yours in `on_evaluate` of a callback"
        )
    return scheduler


def carry_over(old: LRScheduler, new: LRScheduler, optimizer: Optimizer) -> None:
    """Make ``new``, over another number of steps, go on where ``old`` is.

    A closed form is set to the rate it has at this step; any other scheduler keeps the rates
    that the optimizer has now.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    new.load_state_dict(old.state_dict())
    if isinstance(new, LambdaLR):
        rates = [
            base * factor(new.last_epoch)
            for base, factor in zip(new.base_lrs, new.lr_lambdas, strict=True)
        ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
