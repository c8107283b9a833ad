"""Schedules that an evaluation feeds: they follow a metric, not the step.

``reduce_lr_on_plateau`` is torch's ReduceLROnPlateau: the rate is multiplied by ``factor`` after
``patience`` evaluations without an improvement by ``threshold``. ``greedy`` is GreedyLR of
Transformers (arXiv 2512.14527), which also divides by ``factor`` while the metric improves.
Their counters are state, and are saved with the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from resilient.errors import ConfigError
from resilient.train.evaluation.evaluate import require_metric
from resilient.train.schedules.rates import as_they_were

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from resilient.train.arguments import TrainingArguments


def plateau(optimizer: Optimizer, **options: Any) -> ReduceLROnPlateau:
    """Return torch's scheduler."""
    return ReduceLROnPlateau(optimizer, **options)


def greedy(optimizer: Optimizer, **options: Any) -> Any:
    """Return that of Transformers.

    Raises:
        ConfigError: Transformers is not installed, or too old.
    """
    try:
        from transformers.optimization import GreedyLR
    except ImportError as error:
        raise ConfigError(
            "the schedule `greedy` is that of Transformers, which is not installed or too old",
            hint="pip install 'transformers>=5.2'",
        ) from error

    class KeepingTensors(GreedyLR):
        """It puts numbers where an optimizer that compiles its step has tensors."""

        def __init__(self, optimizer: Optimizer, **options: Any) -> None:
            super().__init__(optimizer, **options)
            self._init_lrs = list(map(float, self._init_lrs))
            self._last_lr = list(map(float, self._last_lr))

        def step(self, metrics: float, epoch: int | None = None) -> None:
            with as_they_were(self.optimizer):
                super().step(metrics, epoch)
            self._last_lr = list(map(float, self._last_lr))

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            with as_they_were(self.optimizer):
                super().load_state_dict(state_dict)

    return KeepingTensors(optimizer, **options)


FED = {"reduce_lr_on_plateau": plateau, "greedy": greedy}
"""Name -> a function that makes it."""


_FED_NAMES = frozenset({"ReduceLROnPlateau", "GreedyLR"})


def is_fed_by_metric(scheduler: Any) -> bool:
    """Say whether the scheduler's ``step`` takes a metric."""
    return any(kind.__name__ in _FED_NAMES for kind in type(scheduler).__mro__)


def require_evaluations(
    args: TrainingArguments, scheduler: object, sets: Mapping[str, Any] | None = None
) -> None:
    """Raise if a scheduler follows a metric that nothing gives.

    Args:
        args: name the metric.
        scheduler: may follow one.
        sets: datasets of evaluation by name, if there are several.

    Raises:
        ConfigError: there are no evaluations, or none of these datasets.
    """
    if not is_fed_by_metric(scheduler):
        return
    require_metric(sets, args.metric_for_best_model or "loss", "what the schedule follows")
    if args.eval_strategy == "no":
        raise ConfigError(
            f"`{type(scheduler).__name__}` follows a metric of evaluations, and `eval_strategy` "
            "is 'no'",
            hint='set eval_strategy="steps", or "epoch"',
        )


def step_after_update(scheduler: Any) -> None:
    """Step a scheduler that is a function of the step; one that follows a metric waits for it."""
    if not is_fed_by_metric(scheduler):
        scheduler.step()


def step_after_evaluation(
    scheduler: Any, args: TrainingArguments, metrics: Mapping[str, Any]
) -> None:
    """Step a scheduler that follows a metric.

    Raises:
        ConfigError: no evaluation gives that metric.
    """
    if is_fed_by_metric(scheduler):
        scheduler.step(metric_of(args, metrics))


def metric_of(args: TrainingArguments, metrics: Mapping[str, Any]) -> float:
    """Return what a metric-fed scheduler is stepped with.

    Raises:
        ConfigError: no evaluation gives that metric.
    """
    name = args.metric_for_best_model or "loss"
    name = name if name.startswith("eval_") else f"eval_{name}"
    if name not in metrics:
        raise ConfigError(
            f"`{args.lr_scheduler_type}` follows `{name}`, which is none of {sorted(metrics)}",
            hint="set `metric_for_best_model` to one of them",
        )
    return float(metrics[name])
