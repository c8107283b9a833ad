"""From arguments to a scheduler, and from one length of the run to another."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from resilient.errors import ConfigError
from resilient.train.arguments.words import did_you_mean
from resilient.train.schedules.deepspeed import RateLR, scheduler_block, warmup_by_deepspeed
from resilient.train.schedules.metric import FED
from resilient.train.schedules.rates import set_rate
from resilient.train.schedules.shapes import SHAPES, Span
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from resilient.train.arguments import TrainingArguments

SCHEDULES = (*SHAPES, *FED)


def create_scheduler(args: TrainingArguments, optimizer: Optimizer, total: int) -> LRScheduler:
    """Return the scheduler that ``args`` names over ``total`` steps, DeepSpeed's config first.

    Raises:
        ConfigError: ``lr_scheduler_kwargs`` are not those of this schedule, or DeepSpeed's config
            contradicts the arguments.
    """
    block = scheduler_block(args)
    if block is not None:
        return warmup_by_deepspeed(args, block, optimizer, total)
    name, given = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}
    if isinstance(given, str):
        raise ConfigError(f"`lr_scheduler_kwargs`={given!r} is neither a dict nor JSON of one")
    options = dict(given)
    if name in FED:
        return _fed(args, optimizer, options)
    shape = SHAPES[name]
    _only_its_own(name, shape, options)
    # A script may give an optimizer with another rate, of which floors are a share.
    # A tensor is not the first rate any more: schedules write into it.
    given_rate = getattr(optimizer, "defaults", {}).get("lr")
    rate = given_rate if isinstance(given_rate, int | float) else args.learning_rate
    span = Span(absolute_steps(args.warmup_steps, total), total, rate)

    # A plain function: LambdaLR then keeps it out of its state, which so needs no pickle.
    def factor(step: int) -> float:
        value: float = shape(step, span, **options)
        return value

    return LambdaLR(optimizer, factor)


def _fed(args: TrainingArguments, optimizer: Optimizer, options: dict[str, Any]) -> LRScheduler:
    name = args.lr_scheduler_type
    try:
        made: LRScheduler = FED[name](optimizer, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`lr_scheduler_kwargs` do not fit `{name}`: {error}") from error
    return made


def _only_its_own(name: str, shape: Any, options: Mapping[str, Any]) -> None:
    """Refuse options that a schedule does not have, and one that it needs and did not get."""
    named = [
        one
        for one in inspect.signature(shape).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    known = [one.name for one in named]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"`lr_scheduler_kwargs` name `{option}`, which `{name}` does not have"
                f"{did_you_mean(option, known)}: it has {', '.join(known) or 'none'}"
            )
    missing = [one.name for one in named if one.default is one.empty and one.name not in options]
    if missing:
        raise ConfigError(
            f"`{name}` needs `{missing[0]}`",
            hint=f'set lr_scheduler_kwargs={{"{missing[0]}": ...}}',
        )


def carry_over(old: LRScheduler, new: LRScheduler, optimizer: Optimizer) -> None:
    """Make ``new``, over another number of steps, go on where ``old`` is.

    A closed form is set to the rate it has at this step; any other scheduler keeps the rates
    that the optimizer has now.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    new.load_state_dict(old.state_dict())
    if isinstance(new, LambdaLR):
        bases = [1.0] * len(rates) if isinstance(new, RateLR) else new.base_lrs
        rates = [
            float(base) * factor(new.last_epoch)
            for base, factor in zip(bases, new.lr_lambdas, strict=True)
        ]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)
