"""State of a pipeline model and its optimizer on one rank, named as in the whole model.

Each rank knows the names and shapes of all tensors of the model, but has only the values of its own
stages. A checkpoint of a pipeline therefore does not depend on the number of stages. Single
processes, DDP, FSDP and other pipelines can load such a checkpoint, and a pipeline can load their
checkpoints. ``tests/process/test_pipelines.py`` verifies this property.

On each rank, the parameters of other stages are on the meta device, without memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.state_dict.flatten import PLAIN, escape, flatten_objects, restore_objects
from resilient.state_dict.optimizer import (
    matched_groups,
    require_compatible_optimizer,
    require_same_names,
)
from resilient.state_dict.sharding import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class RemoteTensor:
    """A tensor of another stage, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def remote_tensor(shape: Iterable[int], dtype: torch.dtype) -> FlatShard:
    """Return a tensor that has no element on this rank."""
    return FlatShard(tuple(shape), 0, torch.empty(0, dtype=dtype))


def _own_part(tensor: torch.Tensor, *, writes: bool) -> torch.Tensor:
    """Return this rank's share of a tensor of its stage.

    The placements of a mesh tensor define the share of each rank. Any other tensor is equal on all
    ranks of the stage, and only one of these ranks writes the tensor.
    """
    if type(tensor) not in PLAIN:
        return tensor.detach()
    if not writes:
        return remote_tensor(tensor.shape, tensor.dtype)
    return FlatShard(tuple(tensor.shape), 0, tensor.detach().reshape(-1))


class PipelineModel:
    """Stateful over a model with stages on other ranks.

    Args:
        model: Whole model; parameters of other stages are on the meta device.
        writes: Whether this rank writes the tensors that are equal on all ranks of its stage.
        but: Names of such tensors that another stage writes.
    """

    def __init__(self, model: nn.Module, *, writes: bool, but: Collection[str] = ()) -> None:
        self._model = model
        self._writes = writes
        self._but = but

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors and values by their names in the model."""
        # Tied parameters have several names and must stay one tensor.
        part_by_id: dict[int, Any] = {}
        state: dict[str, Any] = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            if id(value) not in part_by_id:
                part_by_id[id(value)] = self._part(name, value)
            state[name] = part_by_id[id(value)]
        return state

    def _part(self, name: str, value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        if value.is_meta:
            return remote_tensor(value.shape, value.dtype)
        return _own_part(value, writes=self._writes and name not in self._but)

    def like(self, path: str) -> torch.Tensor | None:
        """Return a tensor with the layout of the tensor at ``path``; None for a tensor read whole.

        Args:
            path: Path inside the part, a name.
        """
        live = {
            escape(name): tensor for name, tensor in self._model.state_dict(keep_vars=True).items()
        }
        value = live.get(path)
        if not torch.is_tensor(value) or (type(value) in PLAIN and not value.is_meta):
            return None
        return remote_tensor(value.shape, value.dtype) if value.is_meta else value.detach()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's tensors.

        Raises:
            ValueError: The names are not the model's.
            RuntimeError: A shape is not the model's.
        """
        live = self._model.state_dict(keep_vars=True)
        require_same_names(state_dict, list(live))
        for name, value in live.items():
            saved_value = state_dict[name]
            if not torch.is_tensor(value):
                self._model.load_state_dict({name: saved_value}, strict=False)
                continue
            if tuple(value.shape) != tuple(saved_value.shape):
                raise RuntimeError(
                    f"shape {tuple(saved_value.shape)} of `{name}` was saved, but the shape is "
                    f"{tuple(value.shape)} here"
                )
            if not value.is_meta:
                value.copy_(saved_value)


class PipelineOptimizer:
    """Stateful over an optimizer of this rank's parameters, keyed by parameter name.

    Its state has the form of :class:`~resilient.state_dict.optimizer.NamedOptimizer`'s. The
    constructor removes the parameters of other ranks from the optimizer, and keeps the number of
    groups. The next save does the same for a group that is added later.

    Args:
        model: Whole model; parameters of other stages are on the meta device.
        optimizer: Optimizer of the model's parameters.
        writes: Whether this rank writes the tensors that are equal on all ranks of its stage.
        exchange: Function that sends a value to all stages and returns all values. Collective.

    Raises:
        ConfigError: The optimizer has a parameter that the model does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        writes: bool,
        exchange: Callable[[Any], list[Any]],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._writes = writes
        self._exchange = exchange
        self._groups: list[list[str]] = []
        self._own_names: list[str] = []
        self._by_path: dict[str, torch.Tensor] = {}
        self._adopt_new_groups()

    def _adopt_new_groups(self) -> None:
        """Name the groups that were added, and reduce them to the parameters of this rank.

        Raises:
            ConfigError: A group has a parameter that the model does not have.
        """
        groups = self._optimizer.param_groups[len(self._groups) :]
        if not groups:
            return
        parameter_by_name = dict(self._model.named_parameters())
        names = {id(value): name for name, value in parameter_by_name.items()}
        members = [parameter for group in groups for parameter in group["params"]]
        unknown_count = sum(id(parameter) not in names for parameter in members)
        if unknown_count:
            raise ConfigError(
                f"{unknown_count} of the optimizer's {len(members)} parameters do not belong to "
                "the model: the optimizer was created before the model was cut into stages",
                hint="pass its class as `optimizer_cls_and_kwargs`, or create it in "
                "`create_optimizer` of the trainer",
            )
        names_by_group = [
            [names[id(parameter)] for parameter in group["params"]] for group in groups
        ]
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
        for parameter in [parameter for parameter in self._optimizer.state if parameter.is_meta]:
            del self._optimizer.state[parameter]
        self._groups += names_by_group
        self._own_names += [
            names[id(parameter)] for group in groups for parameter in group["params"]
        ]
        self._by_path |= {
            escape(name): parameter_by_name[name]
            for group_names in names_by_group
            for name in group_names
        }

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self._optimizer

    def steady(self) -> Iterator[torch.Tensor]:
        """Yield the memory that only a step of the optimizer changes."""
        self._adopt_new_groups()
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names. Collective.

        Raises:
            ConfigError: The optimizer got a parameter that the model does not have.
        """
        self._adopt_new_groups()
        plain = self._optimizer.state_dict()
        own_state = {
            self._own_names[number]: {
                kind: flatten_objects(value) for kind, value in parameter_state.items()
            }
            for number, parameter_state in plain["state"].items()
        }
        outlines: dict[str, Any] = {}
        for stage in self._exchange(_mapped(own_state, _outline)):
            outlines |= stage
        mapped_state = _mapped(own_state, lambda tensor: _own_part(tensor, writes=self._writes))
        state = {
            name: mapped_state[name] if name in mapped_state else _mapped(outlines[name], _absent)
            for names in self._groups
            for name in names
            if name in outlines
        }
        groups = [
            {**group, "params": names}
            for group, names in zip(plain["param_groups"], self._groups, strict=True)
        ]
        return {**plain, "state": state, "param_groups": groups}

    def like(self, path: str) -> torch.Tensor | None:
        """Return a tensor with the layout of the state at ``path``; None for a state read whole.

        Args:
            path: Path inside the part, ``state/<parameter>/<name>``.
        """
        place, _, name_and_kind = path.partition("/")
        name, _, kind = name_and_kind.partition("/")
        parameter = self._by_path.get(name) if place == "state" and kind != "step" else None
        if parameter is None or parameter.is_meta:
            return None if parameter is None else remote_tensor(parameter.shape, parameter.dtype)
        return None if type(parameter) in PLAIN else parameter.detach()

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check that ``load_state_dict`` accepts a saved state. Nothing is loaded.

        Raises:
            ValueError: The state belongs to another kind of optimizer, to other parameters, or to
                groups that this optimizer does not have.
            ConfigError: The optimizer got a parameter that the model does not have.
        """
        require_compatible_optimizer(self._optimizer, state_dict)
        self._adopt_new_groups()
        self._matched(state_dict["param_groups"])

    def _matched(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved group of each group of the optimizer."""
        require_same_names(
            (name for group in saved for name in group["params"]),
            [name for names in self._groups for name in names],
        )
        return matched_groups(self._groups, saved, self._optimizer.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each parameter of this rank by its name.

        Raises:
            ValueError: The saved names are not the model's.
            ConfigError: The optimizer got a parameter that the model does not have.
        """
        self._adopt_new_groups()
        saved_groups = self._matched(state_dict["param_groups"])
        own_groups = self._optimizer.state_dict()["param_groups"]
        groups = [
            {**saved_group, "params": group["params"]}
            for group, saved_group in zip(own_groups, saved_groups, strict=True)
        ]
        numbers = {name: number for number, name in enumerate(self._own_names)}
        state = {
            numbers[name]: {kind: restore_objects(value) for kind, value in parameter_state.items()}
            for name, parameter_state in state_dict["state"].items()
            if name in numbers
        }
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})


def _outline(tensor: torch.Tensor) -> RemoteTensor:
    return RemoteTensor(tuple(tensor.shape), tensor.dtype)


def _absent(outline: RemoteTensor) -> FlatShard:
    return remote_tensor(outline.shape, outline.dtype)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every tensor or outline in nested dicts and lists."""
    if isinstance(value, torch.Tensor | RemoteTensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value
