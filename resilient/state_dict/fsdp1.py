"""State of FullyShardedDataParallel (FSDP1) by parameter name, as DTensors.

FSDP1 flattens parameters into one vector per wrapped module. The ``state_dict()`` of the module and
of the optimizer therefore have no values per parameter. This module instead uses
``torch.distributed.checkpoint.state_dict``, which returns values per parameter. If the model has a
``device_mesh``, these values are DTensors. The checkpoint therefore does not depend on FSDP1 or on
the number of ranks. FSDP2, DDP and single processes can load this checkpoint, and FSDP1 can load
their checkpoints. ``tests/process/test_resharding.py`` verifies this property.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from resilient.state_dict.flatten import escape
from resilient.state_dict.optimizer import (
    matched_groups,
    require_compatible_optimizer,
    require_same_names,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch


@contextmanager
def _deprecated_inside() -> Iterator[None]:
    """Return a context without warnings about torch's own deprecated functions."""
    with warnings.catch_warnings():
        for message in (
            "`_get_pg_default_device` will be deprecated",
            "Multiple backends are regis",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


class Fsdp1Model:
    """Stateful over a model wrapped by FSDP1; FSDP needs a ``device_mesh``.

    Args:
        model: Result of ``FullyShardedDataParallel``. All methods are collective.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the wrapped model."""
        return get_model_state_dict(self._model)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load parameters and buffers.

        Raises:
            RuntimeError: Names or shapes differ from the model's.
        """
        set_model_state_dict(self._model, dict(state_dict))


class Fsdp1Optimizer:
    """Stateful over an optimizer of a model wrapped by FSDP1, keyed by parameter name.

    Args:
        model: Result of ``FullyShardedDataParallel``. All methods are collective.
        optimizer: Optimizer of its parameters.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._layout: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names in place of numbers."""
        was_empty = not self._optimizer.state
        with _deprecated_inside():
            optimizer_state = get_optimizer_state_dict(self._model, self._optimizer)
        if was_empty:
            # torch made an empty step to create state. Reset the counter, because that step must
            # not count.
            self._optimizer.state.clear()
        return {**optimizer_state, "state": {}} if was_empty else dict(optimizer_state)

    def like(self, path: str) -> torch.Tensor | None:
        """Return a tensor with the layout of the state at ``path``, that is, of its parameter.

        Args:
            path: Path inside the part, ``state/<parameter>/<name>``.
        """
        if not self._layout:
            model_state = get_model_state_dict(self._model)
            self._layout = {escape(name): value for name, value in model_state.items()}
        place, _, name_and_kind = path.partition("/")
        name, _, kind = name_and_kind.partition("/")
        return self._layout.get(name) if place == "state" and kind != "step" else None

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check the kind of a saved state. Nothing is loaded.

        Raises:
            ValueError: The state belongs to another kind of optimizer.
        """
        require_compatible_optimizer(self._optimizer, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each parameter by its name.

        Raises:
            ValueError: The saved names or groups are not this optimizer's.
        """
        self._layout = {}
        own_groups = self.state_dict()["param_groups"]
        names = [group["params"] for group in own_groups]
        require_same_names(
            (name for group in state_dict["param_groups"] for name in group["params"]),
            [name for group in names for name in group],
        )
        groups = matched_groups(names, state_dict["param_groups"], own_groups)
        if state_dict["state"]:
            self._load_with_state(dict(state_dict["state"]), groups)
            return
        self._optimizer.state.clear()
        for group, saved_group in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved_group.items() if name != "params"})

    def _load_with_state(self, state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Load state by parameter name, and the options of groups in the optimizer's order.

        torch rejects more than one group without parameters, so torch gets only the other groups.
        """
        live = self._optimizer.param_groups
        self._optimizer.param_groups = [group for group in live if group["params"]]
        optimizer_state: dict[str, Any] = {
            "state": state,
            "param_groups": [group for group in groups if group["params"]],
        }
        try:
            with _deprecated_inside():
                set_optimizer_state_dict(self._model, self._optimizer, optimizer_state)
            live = _merged(live, self._optimizer.param_groups, groups)
        finally:
            self._optimizer.param_groups = live


def _merged(
    live: list[dict[str, Any]], loaded: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return loaded groups in the order of the live groups, with saved options in empty groups."""
    loaded_groups = iter(loaded)
    merged_groups = []
    for group, options in zip(live, saved, strict=True):
        if group["params"]:
            merged_groups.append(next(loaded_groups))
        else:
            group.update({name: option for name, option in options.items() if name != "params"})
            merged_groups.append(group)
    return merged_groups
