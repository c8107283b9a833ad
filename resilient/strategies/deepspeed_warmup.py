"""The schedules that DeepSpeed's config may name, as closed forms of the step (pure).

``WarmupLR`` rises and stays, ``WarmupDecayLR`` rises and falls to 0. With ``w`` iterations of
warm-up out of ``n``, iteration ``i`` has the rate ``low + (high - low) f(i)``:

    f(i) = log(i + 1) / log(w)      warm-up, warmup_type "log", which is DeepSpeed's default
    f(i) = i / w                    warm-up, warmup_type "linear"
    f(i) = 1                        after it, WarmupLR
    f(i) = (n - i) / (n - w)        after it, WarmupDecayLR

DeepSpeed's engine starts one before iteration 0 and steps after each update, so the first two
updates have the rate ``low``. The operations are those of deepspeed.runtime.lr_schedules 0.19, so
that the rates are equal to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# DeepSpeed's name -> names of ours that may stand beside it; "linear" is what is there unsaid.
_KINDS = {"WarmupLR": ("linear", "constant_with_warmup"), "WarmupDecayLR": ("linear",)}
_TYPES = ("log", "linear")
_STEPS = 1000  # DeepSpeed's, where nothing says how long a warm-up is
_PARAMS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type")


@dataclass(frozen=True, slots=True)
class Warmup:
    """One of the two schedules.

    Attributes:
        low: the first rate.
        high: the rate after the warm-up; None: that which a group of parameters has at first.
        steps: of the warm-up, at least 2.
        total: steps of the run; None: the rate stays.
        is_log: whether it rises as a logarithm.
    """

    low: float
    high: float | None
    steps: int
    total: int | None
    is_log: bool

    def rate(self, step: int, base: float) -> float:
        """Return the rate after ``step`` updates, of a group whose first rate was ``base``."""
        high = base if self.high is None else self.high
        return self.low if step < 1 else self.low + (high - self.low) * self._factor(step - 1)

    def _factor(self, at: int) -> float:
        if at < self.steps:
            return 1.0 / math.log(self.steps) * math.log(at + 1) if self.is_log else at / self.steps
        if self.total is None:
            return 1.0
        return max(0.0, float(self.total - at) / float(max(1.0, self.total - self.steps)))


def contradictions(block: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a ``scheduler`` block is not known, or is other than the run was told.

    Args:
        block: of the config.
        values: the run's arguments by name.
    """
    kind, params = block.get("type"), block.get("params", {})
    if kind not in _KINDS:
        yield f"scheduler.type={kind!r} is none of {', '.join(_KINDS)}"
    elif values["lr_scheduler_type"] not in _KINDS[kind]:
        yield f"scheduler.type={kind!r} where lr_scheduler_type={values['lr_scheduler_type']!r}"
    for name in params:
        if name not in _PARAMS:
            yield f"scheduler.params.{name} is none of {', '.join(_PARAMS)}"
    if params.get("warmup_type", "log") not in _TYPES:
        yield f"scheduler.params.warmup_type={params['warmup_type']!r} is none of {_TYPES}"
    low = params.get("warmup_min_lr", 0)
    if low != "auto" and not isinstance(low, int | float):
        yield f"scheduler.params.warmup_min_lr={low!r} is no number"
    yield from _other_values(params, values)


def _other_values(params: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what differs, but lengths that only the length of the run will tell."""
    told = {"warmup_max_lr": "learning_rate"}
    if values["max_steps"] > 0:
        told["total_num_steps"] = "max_steps"
    if values["warmup_steps"] >= 1:
        told["warmup_num_steps"] = "warmup_steps"
    for name, argument in told.items():
        value = values[argument]
        if params.get(name) not in (None, "auto", value):
            yield f"scheduler.params.{name}={params[name]!r} where {argument}={value!r}"
    if params.get("warmup_num_steps") == "auto" and not values["warmup_steps"]:
        yield "scheduler.params.warmup_num_steps='auto' where warmup_steps=0, which DeepSpeed lacks"


def read_warmup(block: Mapping[str, Any], rate: float, warmup: int, total: int) -> Warmup:
    """Return what a block asks for, "auto" filled.

    Args:
        block: one without contradictions.
        rate: the run's learning rate.
        warmup: its steps of warm-up; 0 if nothing is said.
        total: its steps.

    Raises:
        ConfigError: a length is no positive number, or is not that of the run.
    """
    params = {name: value for name, value in block.get("params", {}).items() if value is not None}
    steps = params.get("warmup_num_steps", warmup or _STEPS)
    steps = warmup if steps == "auto" else steps
    if not isinstance(steps, int) or steps < 1 or (warmup and steps != warmup):
        raise ConfigError(
            f"scheduler.params.warmup_num_steps={steps!r} in the config of DeepSpeed is no length "
            f"of a warm-up, or not that of `warmup_steps` ({warmup})",
            hint='write "auto" and set warmup_steps',
        )
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr")
    ends = params.get("total_num_steps", total)
    return Warmup(
        low=0.0 if low == "auto" else float(low),
        high=rate if high == "auto" else high,
        steps=max(2, steps),
        total=None if block["type"] == "WarmupLR" else total if ends == "auto" else int(ends),
        is_log=params.get("warmup_type", "log") == "log",
    )
