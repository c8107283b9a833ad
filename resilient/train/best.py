"""Which model is the best so far, and which checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.format.names import CheckpointId, parse_checkpoint
from resilient.state.numbers import plain_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.state import TrainerState


@dataclass(slots=True)
class Best:
    """Which checkpoint holds the best model; kept apart from the trainer's state.

    Its generation tells how often the run was restarted, which two equal runs may differ in.
    """

    checkpoint: CheckpointId | None = None
    sound: CheckpointId | None = None
    """The last before the loss broke, for as long as it is broken."""

    @property
    def kept(self) -> list[CheckpointId]:
        """What no rotation may take."""
        return [one for one in (self.checkpoint, self.sound) if one]

    def mind(self, saved: CheckpointId | None, *, begins: bool, is_broken: bool) -> None:
        """Hold on to the last checkpoint before the loss broke, until it is good again.

        Args:
            saved: the last checkpoint.
            begins: whether the loss was good until now.
            is_broken: whether it is no number.
        """
        if not is_broken:
            self.sound = None
        elif begins and self.sound is None:
            self.sound = saved

    def state_dict(self) -> dict[str, str]:
        """Return the folders' names, or nothing."""
        sound = {"sound": str(self.sound)} if self.sound else {}
        return {"checkpoint": str(self.checkpoint) if self.checkpoint else "", **sound}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the names."""
        self.checkpoint = parse_checkpoint(state_dict["checkpoint"])
        self.sound = parse_checkpoint(state_dict.get("sound", ""))


def is_best(args: TrainingArguments, state: TrainerState, metrics: Mapping[str, Any]) -> bool:
    """Say whether the model that ``metrics`` are of is the best so far, and note it in ``state``.

    Raises:
        ConfigError: ``metric_for_best_model`` is none of them, or is no number.
    """
    if args.metric_for_best_model is None:
        return False
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    if name not in metrics:
        raise ConfigError(f"`metric_for_best_model` `{name}` is none of {sorted(metrics)}")
    up, value = bool(args.greater_is_better), plain_value(metrics[name])
    if not isinstance(value, int | float):
        raise ConfigError(
            f"`metric_for_best_model` `{name}` is a value of the class `{type(value).__name__}`, "
            "which cannot be compared",
            hint=f"return one number as `{name}` from `compute_metrics`",
        )
    if not improves(value, state.best_metric, greater_is_better=up):
        return False
    state.best_metric = value
    if args.save_strategy != "no":
        state.best_global_step = state.global_step
    return True


def improves(value: float, best: float | None, *, greater_is_better: bool) -> bool:
    """Say whether ``value`` beats ``best``: strictly, and anything beats nothing."""
    if best is None:
        return value == value  # noqa: PLR0124 - a NaN is not equal to itself, and beats nothing
    return value > best if greater_is_better else value < best
