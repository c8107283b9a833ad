"""Factory of schedulers from the training arguments, and the learning rates of parameter groups.

Two schedules follow a metric of the evaluations instead of the step. ``reduce_lr_on_plateau`` is
torch's ReduceLROnPlateau. ReduceLROnPlateau multiplies the rate by ``factor`` after ``patience``
evaluations without an improvement by ``threshold``. ``greedy`` is GreedyLR of Transformers (arXiv
2512.14527), which also divides the rate by ``factor`` while the metric improves. The counters of
both schedules are saved with the checkpoint.

If DeepSpeed's config names a schedule, the training loop steps that schedule.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from resilient.errors import ConfigError
from resilient.strategies.deepspeed_config import contradictions, read_config, read_warmup
from resilient.train.arguments.choices import did_you_mean, text_of
from resilient.train.evaluation.loop import require_metric
from resilient.train.schedules.functions import SHAPES, ScheduleSpan
from resilient.train.state import absolute_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.optim import Optimizer

    from resilient.train.arguments import TrainingArguments


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate. A tensor is changed in place, because a compiled step reads it.

    Args:
        group: A group of ``optimizer.param_groups``.
        rate: New learning rate.
    """
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@contextmanager
def keep_initial_rates(optimizer: Optimizer) -> Iterator[None]:
    """Keep the learning-rate tensors while code inside the context replaces them with numbers.

    On exit each tensor is in its group again and has the new rate.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    yield
    for group, had in zip(optimizer.param_groups, rates, strict=True):
        rate, group["lr"] = float(group["lr"]), had
        set_rate(group, rate)


def plateau(optimizer: Optimizer, **options: Any) -> ReduceLROnPlateau:
    """Return torch's ReduceLROnPlateau."""
    return ReduceLROnPlateau(optimizer, **options)


def greedy(optimizer: Optimizer, **options: Any) -> Any:
    """Return GreedyLR of Transformers.

    Raises:
        ConfigError: Transformers is not installed, or too old.
    """
    try:
        from transformers.optimization import GreedyLR
    except ImportError as error:
        raise ConfigError(
            "the schedule `greedy` is part of Transformers, which is not installed or too old",
            hint="pip install 'transformers>=5.2'",
        ) from error

    class KeepingTensors(GreedyLR):
        """GreedyLR that keeps the learning-rate tensors of an optimizer with a compiled step."""

        def __init__(self, optimizer: Optimizer, **options: Any) -> None:
            super().__init__(optimizer, **options)
            self._init_lrs = list(map(float, self._init_lrs))
            self._last_lr = list(map(float, self._last_lr))

        def step(self, metrics: float, epoch: int | None = None) -> None:
            with keep_initial_rates(self.optimizer):
                super().step(metrics, epoch)
            self._last_lr = list(map(float, self._last_lr))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            with keep_initial_rates(self.optimizer):
                super().load_state_dict(state_dict)

    return KeepingTensors(optimizer, **options)


METRIC_SCHEDULES = {"reduce_lr_on_plateau": plateau, "greedy": greedy}
"""Name of a metric-driven schedule -> function that creates the schedule."""


_METRIC_NAMES = frozenset({"ReduceLROnPlateau", "GreedyLR"})


def needs_metric(scheduler: Any) -> bool:
    """Return whether the scheduler's ``step`` takes a metric."""
    return any(kind.__name__ in _METRIC_NAMES for kind in type(scheduler).__mro__)


def require_evaluations(
    args: TrainingArguments, scheduler: object, sets: Mapping[str, Any] | None = None
) -> None:
    """Raise if a scheduler follows a metric that no evaluation provides.

    Args:
        args: Arguments of the run, which name the metric.
        scheduler: Scheduler to check.
        sets: Evaluation datasets by name, if there are several.

    Raises:
        ConfigError: There are no evaluations, or the metric belongs to none of these datasets.
    """
    if not needs_metric(scheduler):
        return
    require_metric(sets, args.metric_for_best_model or "loss", "what the schedule follows")
    if args.eval_strategy == "no":
        raise ConfigError(
            f"`{type(scheduler).__name__}` follows a metric of evaluations, but `eval_strategy` "
            "is 'no'",
            hint='set eval_strategy="steps", or "epoch"',
        )


def step_after_update(scheduler: Any) -> None:
    """Step a scheduler that depends on the step; leave a metric-driven scheduler unchanged."""
    if not needs_metric(scheduler):
        scheduler.step()


def step_after_evaluation(
    scheduler: Any, args: TrainingArguments, metrics: Mapping[str, Any]
) -> None:
    """Step a metric-driven scheduler.

    Raises:
        ConfigError: No evaluation provides the metric.
    """
    if needs_metric(scheduler):
        scheduler.step(metric_of(args, metrics))


def metric_of(args: TrainingArguments, metrics: Mapping[str, Any]) -> float:
    """Return the metric for the step of a metric-driven scheduler.

    Raises:
        ConfigError: No evaluation provides the metric.
    """
    name = args.metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise ConfigError(
            f"`{text_of(args.lr_scheduler_type)}` follows `{name}`, which is none of "
            f"{sorted(metrics)}",
            hint="set `metric_for_best_model` to one of them",
        )
    return float(metrics[name])


class RateLR(LambdaLR):
    """LambdaLR whose functions return rates instead of factors on the initial rates.

    The state is the step, as for LambdaLR. A run that continues without DeepSpeed can load this
    state.
    """

    def get_lr(self) -> list[Any]:
        """Return the rate of each group."""
        return [rate(self.last_epoch) for rate in self.lr_lambdas]


def scheduler_block(args: TrainingArguments) -> dict[str, Any] | None:
    """Return the ``scheduler`` block of the run's DeepSpeed config, or None if it has none.

    Raises:
        ConfigError: The config cannot be read.
    """
    if args.parallelism != "deepspeed":
        return None
    block: dict[str, Any] | None = read_config(args.deepspeed).get("scheduler")
    return block


def warmup_by_deepspeed(
    args: TrainingArguments, block: dict[str, Any], optimizer: Optimizer, total: int
) -> RateLR:
    """Return the schedule of a ``scheduler`` block over ``total`` steps.

    Raises:
        ConfigError: The block has unknown content, or contradicts the arguments.
    """
    if differences := list(contradictions(block, args.to_dict())):
        raise ConfigError(
            f"the config of DeepSpeed and the arguments of the run differ: {'; '.join(differences)}"
        )
    warmup = absolute_steps(args.warmup_steps, total)
    shape = read_warmup(block, args.learning_rate, warmup, total)

    # LambdaLR leaves plain functions out of its state, so the state needs no pickle.
    def of_group(base: float) -> Any:
        return lambda step: shape.rate(step, base)

    bases = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return RateLR(optimizer, [of_group(base) for base in bases])


def require_own(args: TrainingArguments, scheduler: object) -> None:
    """Raise if the config names a schedule and the trainer has another schedule.

    Raises:
        ConfigError: The trainer's scheduler is not that of the config.
    """
    if not isinstance(scheduler, RateLR) and (block := scheduler_block(args)) is not None:
        raise ConfigError(
            f"the config of DeepSpeed names the schedule {block.get('type')!r}, but the trainer "
            f"was given `{type(scheduler).__name__}`: omit one of them"
        )


SCHEDULES = (*SHAPES, *METRIC_SCHEDULES)


def create_scheduler(args: TrainingArguments, optimizer: Optimizer, total: int) -> LRScheduler:
    """Return the scheduler that ``args`` names, over ``total`` steps.

    A schedule in DeepSpeed's config has priority.

    Raises:
        ConfigError: The schedule has no such option in ``lr_scheduler_kwargs``, or DeepSpeed's
            config contradicts the arguments.
    """
    block = scheduler_block(args)
    if block is not None:
        return warmup_by_deepspeed(args, block, optimizer, total)
    name, scheduler_options = text_of(args.lr_scheduler_type), args.lr_scheduler_kwargs or {}
    if isinstance(scheduler_options, str):
        raise ConfigError(
            f"`lr_scheduler_kwargs`={scheduler_options!r} is not a dict or the JSON of one"
        )
    options = dict(scheduler_options)
    if name in METRIC_SCHEDULES:
        return _metric_scheduler(args, optimizer, options)
    shape = SHAPES[name]
    _only_its_own(name, shape, options)
    # A script may pass an optimizer with another rate. The minimum rate is relative to this rate.
    # A tensor no longer holds the initial rate, because schedules write into it.
    given_rate = getattr(optimizer, "defaults", {}).get("lr")
    rate = given_rate if isinstance(given_rate, int | float) else args.learning_rate
    span = ScheduleSpan(absolute_steps(args.warmup_steps, total), total, rate)

    # LambdaLR leaves a plain function out of its state, so the state needs no pickle.
    def factor(step: int) -> float:
        value: float = shape(step, span, **options)
        return value

    return LambdaLR(optimizer, factor)


def _metric_scheduler(
    args: TrainingArguments, optimizer: Optimizer, options: dict[str, Any]
) -> LRScheduler:
    name = text_of(args.lr_scheduler_type)
    try:
        scheduler: LRScheduler = METRIC_SCHEDULES[name](optimizer, **options)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`lr_scheduler_kwargs` do not fit `{name}`: {error}") from error
    return scheduler


def _only_its_own(name: str, shape: Any, options: Mapping[str, Any]) -> None:
    """Refuse an unknown option of a schedule, and a missing option without a default."""
    keyword_parameters = [
        parameter
        for parameter in inspect.signature(shape).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    keyword_names = [parameter.name for parameter in keyword_parameters]
    for option in options:
        if option not in keyword_names:
            raise ConfigError(
                f"`lr_scheduler_kwargs` name `{option}`, which `{name}` does not have"
                f"{did_you_mean(option, keyword_names)}: it has "
                f"{', '.join(keyword_names) or 'none'}"
            )
    missing_options = [
        parameter.name
        for parameter in keyword_parameters
        if parameter.default is parameter.empty and parameter.name not in options
    ]
    if missing_options:
        raise ConfigError(
            f"`{name}` needs `{missing_options[0]}`",
            hint=f'set lr_scheduler_kwargs={{"{missing_options[0]}": ...}}',
        )


def continue_schedule(old: LRScheduler, new: LRScheduler, optimizer: Optimizer) -> None:
    """Continue the schedule ``old`` with ``new``, which has another number of steps.

    A closed form sets its own rate at this step. Any other scheduler keeps the current rates of
    the optimizer.
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


BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """Stateful over a scheduler.

    Attributes:
        scheduler: Scheduler whose state is saved. The optimizer determines the number of groups.
    """

    scheduler: LRScheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self.scheduler.state_dict()

    def with_scheduler(self, scheduler: LRScheduler) -> ScheduleState:
        """Return the same stateful over another scheduler, for a trial load."""
        return replace(self, scheduler=scheduler)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the scheduler; the number of groups may differ if all saved groups are equal.

        Raises:
            ValueError: The number of groups differs and the saved groups are not equal.
        """
        groups = len(self.scheduler.optimizer.param_groups)
        fitted_state = {
            name: _for(groups, name, value) if name in BY_GROUP else value
            for name, value in state_dict.items()
        }
        self.scheduler.load_state_dict(fitted_state)


def _for(groups: int, name: str, values: Any) -> Any:
    if not isinstance(values, list) or len(values) in (0, groups):
        return values
    if any(value != values[0] for value in values):
        raise ValueError(f"`{name}` has values for {len(values)} groups of parameters: {values}")
    return [values[0]] * groups
