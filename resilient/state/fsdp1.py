"""FullyShardedDataParallel (FSDP1) as parts: its flat parameters by their own names, as DTensors.

FSDP1 flattens parameters into one vector per wrapped module, so neither ``state_dict()`` of the
module nor that of the optimizer says what belongs to which parameter.
``torch.distributed.checkpoint.state_dict`` does; with a ``device_mesh`` it gives DTensors, and from
there on such a checkpoint is like any other: FSDP2, DDP and single processes load it, and it loads
theirs. ``tests/process/test_resharding.py`` proves it.
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

from resilient.state.kinds import require_same_kind
from resilient.state.optimizer import matched_groups, require_same_names
from resilient.state.tree import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch


@contextmanager
def _deprecated_inside() -> Iterator[None]:
    """Return a context in which torch may call what torch itself has deprecated."""
    with warnings.catch_warnings():
        for said in ("`_get_pg_default_device` will be deprecated", "Multiple backends are regis"):
            warnings.filterwarnings("ignore", message=said)
        yield


class Fsdp1Model:
    """A Stateful over a model wrapped by FSDP1; give FSDP a ``device_mesh``.

    Args:
        model: what ``FullyShardedDataParallel`` returned. All methods are collective.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers by their names in the model inside."""
        return get_model_state_dict(self._model)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them back.

        Raises:
            RuntimeError: names or shapes are not the model's.
        """
        set_model_state_dict(self._model, dict(state_dict))


class Fsdp1Optimizer:
    """A Stateful over an optimizer of a model wrapped by FSDP1, keyed by parameter name.

    Args:
        model: what ``FullyShardedDataParallel`` returned. All methods are collective.
        optimizer: over its parameters.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._layout: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names in place of numbers."""
        fresh = not self._optimizer.state
        with _deprecated_inside():
            found = get_optimizer_state_dict(self._model, self._optimizer)
        if fresh:
            # To have something to name, torch made a step of nothing, which must not count.
            self._optimizer.state.clear()
        return {**found, "state": {}} if fresh else dict(found)

    def like(self, path: str) -> torch.Tensor | None:
        """Return a tensor with the layout of the state at ``path``: that of its parameter.

        Args:
            path: inside the part, ``state/<parameter>/<name>``.
        """
        if not self._layout:
            named = get_model_state_dict(self._model)
            self._layout = {escape(name): one for name, one in named.items()}
        place, _, rest = path.partition("/")
        name, _, kind = rest.partition("/")
        return self._layout.get(name) if place == "state" and kind != "step" else None

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check the kind of a saved state. Nothing is loaded.

        Raises:
            ValueError: it is of another kind of optimizer.
        """
        require_same_kind(self._optimizer, state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each parameter the state saved under its name.

        Raises:
            ValueError: the saved names or groups are not this optimizer's.
        """
        self._layout = {}
        own = self.state_dict()["param_groups"]
        names = [group["params"] for group in own]
        require_same_names(
            (name for group in state_dict["param_groups"] for name in group["params"]),
            [name for group in names for name in group],
        )
        groups = matched_groups(names, state_dict["param_groups"], own)
        if state_dict["state"]:
            self._load_with_state(dict(state_dict["state"]), groups)
            return
        self._optimizer.state.clear()
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({name: one for name, one in saved.items() if name != "params"})

    def _load_with_state(self, state: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Load state by parameter name, and the options of groups in the optimizer's order.

        torch refuses a second group without parameters, so it gets the groups that have some.
        """
        live = self._optimizer.param_groups
        self._optimizer.param_groups = [group for group in live if group["params"]]
        given: dict[str, Any] = {
            "state": state,
            "param_groups": [group for group in groups if group["params"]],
        }
        try:
            with _deprecated_inside():
                set_optimizer_state_dict(self._model, self._optimizer, given)
            live = _merged(live, self._optimizer.param_groups, groups)
        finally:
            self._optimizer.param_groups = live


def _merged(
    live: list[dict[str, Any]], loaded: list[dict[str, Any]], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return loaded groups in the order of the live ones, with saved options in empty groups."""
    rest = iter(loaded)
    merged = []
    for group, options in zip(live, saved, strict=True):
        if group["params"]:
            merged.append(next(rest))
        else:
            group.update({name: one for name, one in options.items() if name != "params"})
            merged.append(group)
    return merged
