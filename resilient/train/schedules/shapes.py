"""Learning-rate schedules as closed forms of the step.

Each returns the factor on the base rate at ``step`` (0 before the first optimizer step), so a
schedule has no state but the step and can be resumed anywhere. ``warmup`` and ``total`` are
counted in optimizer steps. The forms are those of Transformers 5.23 (optimization.py), operation
for operation, so that the rates are equal to the bit.

Except where said otherwise the factor is ``step / warmup`` during the warm-up, and below
``p = (step - warmup) / (total - warmup)`` goes from 0 to 1 after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from resilient.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """What a schedule spans.

    Attributes:
        warmup: steps of warm-up.
        total: steps of the run.
        rate: the base learning rate, which a floor given as a rate is a share of.
    """

    warmup: int
    total: int
    rate: float

    def rising(self, step: int) -> float:
        """Return the factor of a linear warm-up."""
        return step / max(1, self.warmup)

    def progress(self, step: int) -> float:
        """Return how far the run is between its warm-up and its end."""
        return (step - self.warmup) / max(1, self.total - self.warmup)

    def floor(self, min_lr: float | None, min_lr_rate: float | None) -> float:
        """Return the lowest factor, given as a rate or as a share of the base rate."""
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


def constant(step: int, span: Span) -> float:  # noqa: ARG001 - one shape for all
    """Return 1 at every step."""
    return 1.0


def constant_with_warmup(step: int, span: Span) -> float:
    """Return 1 after the warm-up."""
    return span.rising(step) if step < span.warmup else 1.0


def linear(step: int, span: Span) -> float:
    """Return ``1 - p``, computed as ``(total - step) / (total - warmup)``."""
    if step < span.warmup:
        return span.rising(step)
    return max(0.0, (span.total - step) / max(1, span.total - span.warmup))


def cosine(step: int, span: Span, *, num_cycles: float = 0.5) -> float:
    """Return ``(1 + cos(2 pi c p)) / 2`` with ``c = num_cycles`` waves, by default half a one."""
    if step < span.warmup:
        return span.rising(step)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * span.progress(step))))


def cosine_with_restarts(step: int, span: Span, *, num_cycles: int = 1) -> float:
    """Return ``(1 + cos(pi (c p mod 1))) / 2``: ``c = num_cycles`` half waves, each from 1 to 0."""
    if step < span.warmup:
        return span.rising(step)
    progress = span.progress(step)
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * progress) % 1.0))))


def cosine_with_min_lr(
    step: int,
    span: Span,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """Return ``m + (1 - m) (1 + cos(2 pi c p)) / 2`` with ``m`` the floor."""
    floor = span.floor(min_lr, min_lr_rate)
    if step < span.warmup:
        return span.rising(step)
    factor = 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * span.progress(step)))
    return max(0.0, factor * (1 - floor) + floor)


def cosine_warmup_with_min_lr(
    step: int,
    span: Span,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Return :func:`cosine_with_min_lr`'s form one step ahead, with a warm-up that starts higher.

    The warm-up is ``(step + 1) / warmup``, or from ``w = warmup_lr_rate`` on
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


def polynomial(step: int, span: Span, *, lr_end: float = 1e-7, power: float = 1.0) -> float:
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
    left = 1 - (step - span.warmup) / max(1, span.total - span.warmup)
    factor: float = ((span.rate - lr_end) * left**power + lr_end) / span.rate
    return factor


def inverse_sqrt(step: int, span: Span, *, timescale: int | None = None) -> float:
    """Return ``1 / sqrt((step - warmup + t) / t)``; ``t = timescale``, by default the warm-up.

    Without a warm-up ``t`` is 10,000.
    """
    scale = timescale if timescale is not None else span.warmup or 10_000
    if step < span.warmup:
        return span.rising(step)
    return 1.0 / math.sqrt((step + (scale - span.warmup)) / scale)


def _bend(kind: str, name: str, bends: dict[str, float]) -> float:
    if kind not in bends:
        raise ConfigError(f"`{name}`={kind!r} is none of {', '.join(bends)}")
    return bends[kind]


def warmup_stable_decay(  # noqa: PLR0913 - the field's names
    step: int,
    span: Span,
    *,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Return a rise, a plateau of 1, and a fall to ``m = min_lr_ratio``.

    With ``q`` from 0 to 1 over the rise, its factor ``m + (1 - m) f(q)`` has ``f`` linear ``q``,
    cosine ``(1 - cos(pi q)) / 2`` or 1-sqrt ``1 - sqrt(1 - q)``; over the fall of
    ``num_decay_steps`` it is ``1 - q``, ``(1 + cos(2 pi c q)) / 2`` or ``1 - sqrt(q)``.
    """
    stable = span.total - span.warmup - num_decay_steps
    stable = stable if num_stable_steps is None else num_stable_steps
    falls_at = span.warmup + stable
    if step < span.warmup:
        done = step / max(1, span.warmup)
        bends = {
            "linear": done,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * done)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - done),
        }
        factor = _bend(warmup_type, "warmup_type", bends)
    elif step < falls_at:
        return 1.0
    elif step < falls_at + num_decay_steps:
        done = (step - falls_at) / max(1, num_decay_steps)
        bends = {
            "linear": 1.0 - done,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * done)),
            "1-sqrt": 1.0 - math.sqrt(done),
        }
        factor = _bend(decay_type, "decay_type", bends)
    else:
        return min_lr_ratio
    return max(0.0, factor * (1.0 - min_lr_ratio) + min_lr_ratio)


SHAPES: dict[str, Any] = {
    one.__name__: one
    for one in (
        *(linear, cosine, constant, constant_with_warmup, cosine_with_restarts),
        *(cosine_with_min_lr, cosine_warmup_with_min_lr, polynomial, inverse_sqrt),
        warmup_stable_decay,
    )
}
"""Name -> ``shape(step, span, **options)``."""
