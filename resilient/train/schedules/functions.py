"""Closed-form learning-rate schedules, and functions that return schedules for a user's own loop.

Each closed form returns the factor that multiplies the base rate at ``step`` (0 before the first
optimizer step). The step is the only state, so a schedule resumes at any step. ``warmup`` and
``total`` are optimizer steps. The operations are exactly those of Transformers 5.23
(optimization.py), so the rates are bitwise equal.

During the warm-up the factor is ``step / warmup`` unless stated otherwise. After the warm-up
``p = (step - warmup) / (total - warmup)`` rises from 0 to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from resilient.errors import ConfigError
from resilient.train.arguments.choices import did_you_mean

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, slots=True)
class ScheduleSpan:
    """Length, warm-up and base rate of a schedule.

    Attributes:
        warmup: Optimizer steps of the warm-up.
        total: Optimizer steps of the run.
        rate: Base learning rate; a floor given as a rate is divided by it.
    """

    warmup: int
    total: int
    rate: float

    def rising(self, step: int) -> float:
        """Return the factor of a linear warm-up."""
        return step / max(1, self.warmup)

    def progress(self, step: int) -> float:
        """Return the progress between the warm-up (0) and the end of the run (1)."""
        return (step - self.warmup) / max(1, self.total - self.warmup)

    def floor(self, min_lr: float | None, min_lr_rate: float | None) -> float:
        """Return the lowest factor, from a rate or from a share of the base rate.

        Raises:
            ConfigError: Both values are given, or no value is given.
        """
        if min_lr is not None and min_lr_rate is not None:
            raise ConfigError(
                "`lr_scheduler_kwargs` sets both `min_lr` and `min_lr_rate`: use one of them"
            )
        if min_lr is not None:
            return min_lr / self.rate
        if min_lr_rate is None:
            raise ConfigError(
                "this schedule needs a floor",
                hint='set lr_scheduler_kwargs={"min_lr_rate": 0.1}, or `min_lr`',
            )
        return min_lr_rate


def constant(step: int, span: ScheduleSpan) -> float:  # noqa: ARG001 - all forms have one signature
    """Return 1 at every step."""
    return 1.0


def constant_with_warmup(step: int, span: ScheduleSpan) -> float:
    """Return 1 after the warm-up."""
    return span.rising(step) if step < span.warmup else 1.0


def linear(step: int, span: ScheduleSpan) -> float:
    """Return ``1 - p``, computed as ``(total - step) / (total - warmup)``."""
    if step < span.warmup:
        return span.rising(step)
    return max(0.0, (span.total - step) / max(1, span.total - span.warmup))


def cosine(step: int, span: ScheduleSpan, *, num_cycles: float = 0.5) -> float:
    """Return ``(1 + cos(2 pi c p)) / 2`` with ``c = num_cycles`` waves, by default half a wave."""
    if step < span.warmup:
        return span.rising(step)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * span.progress(step))))


def cosine_with_restarts(step: int, span: ScheduleSpan, *, num_cycles: int = 1) -> float:
    """Return ``(1 + cos(pi (c p mod 1))) / 2``: ``c = num_cycles`` half waves, each from 1 to 0."""
    if step < span.warmup:
        return span.rising(step)
    progress = span.progress(step)
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * progress) % 1.0))))


def cosine_with_min_lr(
    step: int,
    span: ScheduleSpan,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """Return ``m + (1 - m) (1 + cos(2 pi c p)) / 2``, where ``m`` is the floor."""
    floor = span.floor(min_lr, min_lr_rate)
    if step < span.warmup:
        return span.rising(step)
    factor = 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * span.progress(step)))
    return max(0.0, factor * (1 - floor) + floor)


def cosine_warmup_with_min_lr(
    step: int,
    span: ScheduleSpan,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Return :func:`cosine_with_min_lr` one step ahead; the warm-up starts above 0.

    The warm-up is ``(step + 1) / warmup``. With ``w = warmup_lr_rate`` it is
    ``w + (1 - w) step / (warmup - 1)``.
    """
    floor = span.floor(min_lr, min_lr_rate)
    if step < span.warmup:
        if warmup_lr_rate is None:
            return (step + 1.0) / max(1.0, span.warmup)
        start = float(warmup_lr_rate)
        return start + (1.0 - start) * step / max(1, span.warmup - 1)
    progress = (step - span.warmup + 1.0) / max(1.0, span.total - span.warmup)
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0.0, factor * (1 - floor) + floor)


def polynomial(step: int, span: ScheduleSpan, *, lr_end: float = 1e-7, power: float = 1.0) -> float:
    """Return ``((r - e) (1 - p)^power + e) / r`` with base rate ``r`` and ``e = lr_end``."""
    if not span.rate > lr_end:
        raise ConfigError(
            f"the polynomial schedule ends at `lr_end`={lr_end}, which must be below "
            f"`learning_rate`={span.rate}"
        )
    if step < span.warmup:
        return span.rising(step)
    if step > span.total:
        return lr_end / span.rate
    remaining_share = 1 - (step - span.warmup) / max(1, span.total - span.warmup)
    factor: float = ((span.rate - lr_end) * remaining_share**power + lr_end) / span.rate
    return factor


def inverse_sqrt(step: int, span: ScheduleSpan, *, timescale: int | None = None) -> float:
    """Return ``1 / sqrt((step - warmup + t) / t)``; ``t = timescale``, default: the warm-up.

    Without a warm-up the default of ``t`` is 10,000.
    """
    scale = timescale if timescale is not None else span.warmup or 10_000
    if step < span.warmup:
        return span.rising(step)
    return 1.0 / math.sqrt((step + (scale - span.warmup)) / scale)


def _curve(kind: str, name: str, curves: dict[str, float]) -> float:
    if kind not in curves:
        raise ConfigError(f"`{name}`={kind!r} is none of {', '.join(curves)}")
    return curves[kind]


def warmup_stable_decay(  # noqa: PLR0913 - the field's names
    step: int,
    span: ScheduleSpan,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Return a rise, a plateau of 1, and a fall to ``m = min_lr_ratio``.

    The factor of the rise and of the fall is ``m + (1 - m) f(q)``, with ``q`` from 0 to 1. The
    fall takes ``num_decay_steps``, and ``c = num_cycles``::

        type      rise                    fall
        linear    q                       1 - q
        cosine    (1 - cos(pi q)) / 2     (1 + cos(2 pi c q)) / 2
        1-sqrt    1 - sqrt(1 - q)         1 - sqrt(q)
    """
    stable = span.total - span.warmup - num_decay_steps
    stable = stable if num_stable_steps is None else num_stable_steps
    falls_at = span.warmup + stable
    if step < span.warmup:
        progress = step / max(1, span.warmup)
        curves = {
            "linear": progress,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - progress),
        }
        factor = _curve(warmup_type, "warmup_type", curves)
    elif step < falls_at:
        return 1.0
    elif step < falls_at + num_decay_steps:
        progress = (step - falls_at) / max(1, num_decay_steps)
        curves = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress)),
            "1-sqrt": 1.0 - math.sqrt(progress),
        }
        factor = _curve(decay_type, "decay_type", curves)
    else:
        return min_lr_ratio
    return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)


SHAPES: dict[str, Any] = {
    schedule.__name__: schedule
    for schedule in (
        *(linear, cosine, constant, constant_with_warmup, cosine_with_restarts),
        *(cosine_with_min_lr, cosine_warmup_with_min_lr, polynomial, inverse_sqrt),
        warmup_stable_decay,
    )
}
"""Name -> ``shape(step, span, **options)``."""


def get_scheduler(
    name: str,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int = 0,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
    *,
    last_epoch: int = -1,
) -> LRScheduler:
    """Return a scheduler of the optimizer's rates, by its name in ``lr_scheduler_type``.

    The step is the only state, so the schedule is saved and resumed without pickle.

    Args:
        name: Name of a schedule that needs no metric.
        optimizer: Optimizer whose rates are scaled.
        num_warmup_steps: Optimizer steps of the warm-up.
        num_training_steps: Optimizer steps of the run.
        scheduler_specific_kwargs: Options of this schedule, as in ``lr_scheduler_kwargs``.
        last_epoch: Step to continue from; -1 begins.

    Raises:
        ConfigError: There is no such schedule.
    """
    name = str(getattr(name, "value", name))
    if name not in SHAPES:
        raise ConfigError(
            f"`{name}` is not a schedule{did_you_mean(name, SHAPES)}",
            hint=f"use {', '.join(SHAPES)}",
        )
    span = ScheduleSpan(num_warmup_steps, num_training_steps, optimizer.defaults["lr"])
    shape, options = SHAPES[name], scheduler_specific_kwargs or {}

    # LambdaLR leaves a plain function out of its state.
    def factor(step: int) -> float:
        value: float = shape(step, span, **options)
        return value

    return LambdaLR(optimizer, factor, last_epoch)


def get_constant_schedule(optimizer: Optimizer, last_epoch: int = -1) -> LRScheduler:
    """Return a constant rate."""
    return get_scheduler("constant", optimizer, last_epoch=last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LRScheduler:
    """Return a linear rise, then a constant rate."""
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
    """Return a linear rise, then ``num_cycles`` waves of a cosine.

    The default of half a wave ends at 0.
    """
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
    """Return a linear rise, then ``num_cycles`` half waves of a cosine, each from the full rate."""
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
    """Return a linear rise, then a polynomial fall to the rate ``lr_end``."""
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
    """Return a linear rise, then a fall with the inverse square root of the step."""
    return get_scheduler(
        "inverse_sqrt",
        optimizer,
        num_warmup_steps,
        scheduler_specific_kwargs={"timescale": timescale},
        last_epoch=last_epoch,
    )
