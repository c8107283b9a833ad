"""A scheduler's state, for as many groups of parameters as there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.lr_scheduler import LRScheduler

BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """A Stateful over a scheduler.

    Attributes:
        scheduler: whose optimizer's groups count.
    """

    scheduler: LRScheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return self.scheduler.state_dict()

    def with_scheduler(self, scheduler: LRScheduler) -> ScheduleState:
        """Return the same stateful over another scheduler, to rehearse a load."""
        return replace(self, scheduler=scheduler)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back; where parameters are grouped otherwise, all groups must have been equal.

        Raises:
            ValueError: they were not.
        """
        groups = len(self.scheduler.optimizer.param_groups)
        taken = {
            name: _for(groups, name, value) if name in BY_GROUP else value
            for name, value in state_dict.items()
        }
        self.scheduler.load_state_dict(taken)


def _for(groups: int, name: str, values: Any) -> Any:
    if not isinstance(values, list) or len(values) in (0, groups):
        return values
    if any(one != values[0] for one in values):
        raise ValueError(f"`{name}` is of {len(values)} groups of parameters: {values}")
    return [values[0]] * groups
