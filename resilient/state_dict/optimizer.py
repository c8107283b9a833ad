"""Optimizer state by parameter name, also if an optimizer has only pieces of parameters (ZeRO 1).

The state of ``torch.optim`` numbers parameters by their order in the groups. If a script reorders
layers, a load would give each layer the moments of another layer. With names, a reordering is
harmless, and any other change of the parameters is an error.

torch loads the state of one kind of optimizer into another kind. The first step then raises a
``KeyError``, or uses moments with another meaning. Therefore a load rejects the state of another
kind of optimizer. The group options and the state of each parameter identify the kind. This check
ignores options that change between torch releases.

With ZeRO 1, the optimizer of a rank updates one contiguous run of elements of each parameter. The
run may be empty, and the optimizer may have it as several tensors (pieces). A save concatenates the
states of the pieces of a run. The checkpoint therefore does not depend on the pieces or on the
number of ranks. Replicas, FSDP and single processes can load the checkpoint, and such an optimizer
can load their checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resilient.errors import ConfigError, UnsavableState
from resilient.state_dict.flatten import escape, flatten_objects, restore_objects
from resilient.state_dict.sharding import FlatShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_SAYS_NOTHING = frozenset(
    {
        *("params", "param_names", "lr", "weight_decay", "initial_lr"),
        # Options that select the kernel, and options that only some releases or packages have.
        *("foreach", "fused", "capturable", "differentiable", "maximize"),
        *("amsgrad", "bias_correction", "decoupled_weight_decay", "step"),
        # Values that schedulers of torch add to a group.
        *("max_lr", "min_lr", "swa_lr", "base_momentum", "initial_momentum"),
        *("max_momentum", "min_momentum"),
    }
)

_TWO_MOMENTS = frozenset({"exp_avg", "exp_avg_sq"})
_KEPT = {
    "ASGD": frozenset({"ax", "eta", "mu"}),
    "Adadelta": frozenset({"acc_delta", "square_avg"}),
    "Adagrad": frozenset({"sum"}),
    "Adam": _TWO_MOMENTS,
    "AdamW": _TWO_MOMENTS,
    "Adamax": frozenset({"exp_avg", "exp_inf"}),
    "NAdam": _TWO_MOMENTS | {"mu_product"},
    "RAdam": _TWO_MOMENTS,
    "RMSprop": frozenset({"square_avg"}),
    "Rprop": frozenset({"prev", "step_size"}),
    "SparseAdam": _TWO_MOMENTS,
}
"""State that each optimizer of torch needs after its first step."""


def require_compatible_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]
) -> None:
    """Raise if an optimizer cannot continue from a saved state.

    Args:
        optimizer: Optimizer that would load the state.
        saved: ``state`` by parameter and ``param_groups``; the function inspects only names.

    Raises:
        ValueError: The state belongs to another kind of optimizer.
    """
    name = type(optimizer).__name__
    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    own_options, saved_options = (
        _identifying_options(groups),
        _identifying_options(saved["param_groups"]),
    )
    missing_options = (optimizer.defaults.keys() & own_options) - saved_options
    unknown_options = saved_options - own_options - optimizer.defaults.keys()
    if missing_options and unknown_options:
        raise ValueError(
            f"it was saved by an optimizer with the options {_listed(saved_options)}, but {name} "
            f"has {_listed(own_options)}; create the optimizer that was saved"
        )
    needed_keys = _KEPT.get(name) if type(optimizer).__module__.startswith("torch.optim.") else None
    # The user may store other values in the state, under keys that are not names of parameters.
    members = {member for group in saved["param_groups"] for member in group["params"]}
    for parameter, parameter_state in saved["state"].items():
        if (
            needed_keys
            and parameter in members
            and parameter_state
            and not needed_keys <= parameter_state.keys()
        ):
            raise ValueError(
                f"it was saved by an optimizer that keeps {_listed(parameter_state)} of "
                f"`{parameter}`, but "
                f"{name} needs {_listed(needed_keys)}; create the optimizer that was saved"
            )


def _identifying_options(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the group options that identify the kind of an optimizer."""
    return {name for group in groups for name in group} - _SAYS_NOTHING


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "no options"


_MEMBERS = frozenset({"params", "param_names"})
"""Keys of a group that name its parameters; the other keys are options."""


class NamedOptimizer:
    """Stateful over an optimizer, keyed by the model's parameter names.

    Args:
        model: The plain module, not its parallel wrapper.
        optimizer: Optimizer with only parameters of that module.

    Attributes:
        adds_groups: Whether a load adds the groups that training had added when it saved.

    Raises:
        ConfigError: The optimizer has a parameter that the model does not have.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parameters: list[torch.Tensor] = []
        self._names: list[str] = []
        self._names_by_id: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._sizes: list[int] = []
        self._model_tensors: dict[str, torch.Tensor] = {}
        self.adds_groups = False
        self._name()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself."""
        return self._optimizer

    def _name(self) -> None:
        """Name the optimizer's current parameters; groups may have been added.

        Raises:
            ConfigError: The optimizer has a parameter that the model does not have.
        """
        groups = self._optimizer.param_groups
        members = [parameter for group in groups for parameter in group["params"]]
        # Every save calls this method, so it searches the model only after a change of the
        # optimizer.
        if len(members) == len(self._parameters) and all(map(is_, members, self._parameters)):
            return
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        unknown_count = sum(id(parameter) not in names for parameter in members)
        if unknown_count:
            raise ConfigError(
                f"{unknown_count} of the optimizer's {len(members)} parameters do not belong to "
                "the model",
                hint="create the optimizer, and groups added later, from model.parameters() of the "
                "model you train",
            )
        self._parameters = members
        self._names = [names[id(parameter)] for parameter in members]
        self._names_by_id = dict(zip(map(id, members), self._names, strict=True))
        self._tensors = dict(zip(map(escape, self._names), members, strict=True))
        self._sizes = group_sizes(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names in place of numbers.

        Optimizer state under keys that are not parameters is returned unchanged.

        Raises:
            ConfigError: The optimizer has a parameter that the model does not have.
            UnsavableState: The optimizer stores state of its own under a parameter's name or a
                number.
        """
        if self.uses_default_state_dict():
            return self._read_plain_state()
        self._require_no_numbers()
        plain = self._optimizer.state_dict()
        groups = [
            {**group, "params": [self._names[number] for number in group["params"]]}
            for group in plain["param_groups"]
        ]
        state = {self._key_of(key): _to_savable(value) for key, value in plain["state"].items()}
        return {**plain, "state": state, "param_groups": groups}

    def _require_no_numbers(self) -> None:
        # torch's own state_dict() numbers the parameters.
        for key in self._optimizer.state:
            if isinstance(key, int):
                raise UnsavableState(
                    f"the optimizer keeps a state of its own under {key!r}, which could be "
                    "mistaken for the number of a parameter",
                    path=f"state/{key}",
                    hint="store it under a name in optimizer.state",
                )

    def _key_of(self, key: Any) -> Any:
        """Return the parameter name for a number, and any other key unchanged."""
        if type(key) is int:
            return self._names[key]
        if key in self._names:
            raise UnsavableState(
                f"the optimizer keeps a state of its own under `{key}`, which is the name of a "
                "parameter",
                path=f"state/{escape(key)}",
                hint="store it under another key of optimizer.state",
            )
        return key

    @property
    def names(self) -> Sequence[str]:
        """Names of the optimizer's parameters at the last ``state_dict`` call, in order."""
        return self._names

    def uses_default_state_dict(self) -> bool:
        """Return whether the optimizer uses torch's ``state_dict``, with state of parameters only.

        Raises:
            ConfigError: The optimizer has a parameter that the model does not have.
        """
        self._name()
        return _is_plain(self._optimizer) and self._names_by_id.keys() >= set(
            map(id, self._optimizer.state)
        )

    def groups(self) -> list[dict[str, Any]]:
        """Return ``param_groups`` of a plain optimizer, with names in place of parameters."""
        names = self._names_by_id
        return [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [names[id(parameter)] for parameter in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def _read_plain_state(self) -> dict[str, Any]:
        """Return the state of a plain optimizer, faster than ``state_dict()``."""
        names = self._names_by_id
        state = {
            names[id(parameter)]: _to_savable(value)
            for parameter, value in self._optimizer.state.items()
        }
        return {"state": state, "param_groups": self.groups()}

    def like(self, path: str) -> torch.Tensor | None:
        """Return the parameter with the same layout as the state at ``path``.

        The state itself may not exist yet before the first step.

        Args:
            path: Path inside the part, ``state/<parameter>/<name>``.
        """
        if group_sizes(self._optimizer) != self._sizes:
            self._name()
        place, _, name_and_kind = path.partition("/")
        name, _, kind = name_and_kind.partition("/")
        # torch never shards the step counter, even if the other state is sharded.
        if place != "state" or kind == "step":
            return None
        return self._tensors[name] if name in self._tensors else self._of_model().get(name)

    def _of_model(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters by escaped name, including parameters that a load adds."""
        if not self._model_tensors:
            self._model_tensors = {
                escape(name): parameter for name, parameter in self._model.named_parameters()
            }
        return self._model_tensors

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check that ``load_state_dict`` accepts a saved state. Nothing is loaded.

        Raises:
            ValueError: The state belongs to another kind of optimizer, to other parameters, or to
                groups that this optimizer does not have.
            ConfigError: The optimizer has a parameter that the model does not have.
        """
        require_compatible_optimizer(self._optimizer, state_dict)
        self._name()
        self._matched(state_dict["param_groups"])

    def _matched(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved group of each group of the optimizer."""
        own_groups = [*self.groups(), *self._added_groups(saved)]
        own_names = [name for group in own_groups for name in group["params"]]
        require_same_names((name for group in saved for name in group["params"]), own_names)
        return matched_groups([group["params"] for group in own_groups], saved, own_groups)

    def _added_groups(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved groups that a load adds; an added group comes last in torch."""
        added_groups = saved[len(self._optimizer.param_groups) :] if self.adds_groups else []
        names = [name for group in added_groups for name in group["params"]]
        is_known = self._of_model().keys() >= set(map(escape, names))
        is_new = len(set(names)) == len(names) and set(self._names).isdisjoint(names)
        return [dict(group) for group in added_groups] if is_known and is_new else []

    def _add_groups(self, saved: Mapping[str, Any]) -> None:
        """Add the groups that the saved training had added, and enable their gradients."""
        for group in self._added_groups(saved["param_groups"]):
            tensors = [self._of_model()[escape(name)] for name in group["params"]]
            trained = set(group["params"]) & saved["state"].keys() or set(group["params"])
            for name, tensor in zip(group["params"], tensors, strict=True):
                if name in trained and tensor.is_floating_point():
                    tensor.requires_grad_()
            names = group.pop("param_names", None)
            group["params"] = list(zip(names, tensors, strict=True)) if names else tensors
            self._optimizer.add_param_group(group)
        self._name()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each parameter by its name.

        Raises:
            ValueError: The saved names are not this optimizer's.
            IncompatibleCheckpoint: The state has an object of an unknown class.
            ConfigError: The optimizer has a parameter that the model does not have.
        """
        self._name()
        saved_groups = self._matched(state_dict["param_groups"])
        self._add_groups(state_dict)
        # If a parameter is twice in a group, torch numbers it by its last place.
        numbers = {name: number for number, name in enumerate(self._names)}
        own_groups = self._optimizer.state_dict()["param_groups"]
        groups = [
            {**saved_group, "params": group["params"]}
            for group, saved_group in zip(own_groups, saved_groups, strict=True)
        ]
        state = {
            numbers.get(name, name): _from_savable(value)
            for name, value in state_dict["state"].items()
        }
        live = self._optimizer.state
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        for name in state.keys() - numbers.values():
            state[name] = _moved(state[name], live.get(name), device)
        self._optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})
        if type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            self._undo_casts(state)

    def _undo_casts(self, saved: Mapping[Any, Any]) -> None:
        """Undo torch's casts of parameter state to the dtype of the parameters."""
        is_own = not type(self._optimizer).__module__.startswith("torch.optim.")
        for number, parameter in enumerate(self._parameters):
            parameter_state = self._optimizer.state.get(parameter)
            if (
                number in saved
                and isinstance(parameter_state, dict)
                and isinstance(saved[number], dict)
            ):
                for key, value in saved[number].items():
                    if key in parameter_state:
                        parameter_state[key] = _uncast(value, parameter_state[key], is_own=is_own)


def _moved(state: Any, live: Any, device: torch.device) -> Any:
    """Return optimizer state on its previous device, or else on the device of its parameters.

    torch moves only the state of parameters. Scalar tensors stay on the CPU, as torch's step
    counters do.
    """
    if isinstance(state, dict):
        live_state = live if isinstance(live, dict) else {}
        return {key: _moved(value, live_state.get(key), device) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    if isinstance(live, torch.Tensor):
        return state.to(live.device)
    return state.to(device) if state.ndim else state


def _uncast(saved: Any, loaded: Any, *, is_own: bool) -> Any:
    """Return the saved value if torch's cast changed it, else the loaded value.

    At a load, torch casts tensors to the dtype of their parameter, and destroys text. torch's own
    optimizers keep floating-point state in that dtype. Another optimizer may keep wider state, for
    example the parameter in full precision.

    Args:
        saved: Value before the load.
        loaded: Value after the load.
        is_own: Whether the optimizer is of a class outside of torch.
    """
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        is_number = saved.is_floating_point() or saved.is_complex()
        is_wide = is_own and saved.itemsize > loaded.itemsize
        is_cast = saved.dtype != loaded.dtype and (is_wide or not is_number)
        return saved.to(loaded.device) if is_cast else loaded
    if type(saved) is dict and type(loaded) is dict:
        return {
            key: _uncast(value, loaded[key], is_own=is_own) if key in loaded else value
            for key, value in saved.items()
        }
    if type(saved) in (list, tuple) and type(loaded) is type(saved) and len(saved) == len(loaded):
        pairs = zip(saved, loaded, strict=True)
        return type(saved)(_uncast(*pair, is_own=is_own) for pair in pairs)
    return loaded if isinstance(loaded, torch.Tensor) else saved


def _to_savable(state: Any) -> Any:
    """Return the state of one parameter, or any other value of the state, in a savable form."""
    if not isinstance(state, dict):
        return flatten_objects(state)
    return {
        kind: value if type(value) is torch.Tensor else flatten_objects(value)
        for kind, value in state.items()
    }


def _from_savable(state: Any) -> Any:
    restored_state = restore_objects(state)
    if restored_state is not state or not isinstance(state, dict):
        return restored_state
    return {kind: restore_objects(value) for kind, value in state.items()}


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer uses torch's base ``state_dict`` for parameters only."""
    kind = type(optimizer)
    return (
        kind.state_dict is torch.optim.Optimizer.state_dict
        and "state_dict" not in vars(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks  # noqa: SLF001 - nor hooks of torch's
        and not optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001
    )


def group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the current number of parameters of each group of an optimizer."""
    return [len(group["params"]) for group in optimizer.param_groups]


def require_all_named(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> None:
    """Raise if a group has parameters without names.

    Args:
        optimizer: Optimizer whose groups may have grown.
        names: Known names of the parameters of each group.

    Raises:
        ConfigError: A group was added later, which cannot be trained here.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group["params"] and not names[number]:
            raise ConfigError(
                f"group {number} of the optimizer, of {len(group['params'])} parameters, was "
                "added after the optimizer was sharded over the ranks, so it is neither reduced "
                "nor saved",
                hint="pass all groups at once; give groups for later a learning rate of 0",
            )


def require_same_names(
    saved: Iterable[str], current: Sequence[str], *, partial: bool = False
) -> None:
    """Raise if the saved parameters are not those of this optimizer.

    Args:
        saved: Names of saved parameters.
        current: Names of own parameters.
        partial: Whether saved names may be missing, as before a first step.

    Raises:
        ValueError: The names differ.
    """
    differ = sorted(set(saved) - set(current) if partial else set(saved) ^ set(current))
    if differ:
        raise ValueError(f"parameters differ: {', '.join(differ[:5])} ({len(differ)} in all)")


def matched_groups(
    names: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    current: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return the saved group of each own group, matched by parameter names.

    The grouping may differ if the groups have equal options. A group without parameters gets the
    options of a saved group without parameters, preferably of the group at its own position. If the
    checkpoint has none, the group keeps its own options.

    Args:
        names: Names of the parameters of each own group.
        saved: Groups whose ``params`` are names.
        current: Options of each own group.

    Raises:
        ValueError: The grouping differs, and the groups have different options.
    """
    matched: list[dict[str, Any] | None] = [
        _group_of(list(own_names), saved) if own_names else None for own_names in names
    ]
    empty_numbers = [number for number, group in enumerate(saved) if not group["params"]]
    vacant_numbers = [number for number, value in enumerate(matched) if value is None]
    for number in [value for value in vacant_numbers if value in empty_numbers]:
        matched[number] = dict(saved[number])
        empty_numbers.remove(number)
    for number in [value for value in vacant_numbers if matched[value] is None]:
        group = saved[empty_numbers.pop(0)] if empty_numbers else current[number]
        matched[number] = {**group, "params": []}
    return [value for value in matched if value is not None]


def _group_of(names: list[str], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the saved group of some parameters, or the common options of several groups.

    Raises:
        ValueError: The parameters are in several groups with different options.
    """
    groups = [group for group in saved if not set(names).isdisjoint(group["params"])]
    for group in groups:
        if set(group["params"]) == set(names):
            return dict(group)
    options = [
        {key: value for key, value in group.items() if key not in _MEMBERS} for group in groups
    ]
    members = {name for group in groups for name in group["params"]}
    if (
        not groups
        or set(names) - members
        or not all(is_same(option, options[0]) for option in options)
    ):
        raise ValueError(f"parameters are grouped differently: {sorted(names)[:3]}")
    return {**options[0], "params": names}


def is_same(left: Any, right: Any) -> bool:
    """Return whether two option values are equal; NaN equals NaN."""
    if isinstance(left, torch.Tensor | np.ndarray):
        is_alike = type(left) is type(right) and (left.dtype, left.shape) == (
            right.dtype,
            right.shape,
        )
        return is_alike and bool((left == right).all())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    is_nan = left != left and right != right  # noqa: PLR0124
    return type(right) not in (torch.Tensor, np.ndarray) and bool(left == right or is_nan)


_COUNT = "step"


@dataclass(frozen=True, slots=True, eq=False)
class ParameterSlice:
    """Elements of one parameter that this rank's optimizer updates.

    Attributes:
        name: Name of the parameter in the model.
        group: Number of its parameter group.
        shape: Shape of the whole parameter.
        start: First element.
        memory: The elements, a view of the parameter; may be empty.
        pieces: The optimizer's tensors: consecutive views of ``memory``, at least one.
        is_whole: Whether the parameter is not split over ranks.
        state_memory: Memory with one number per element, by kind of state; allocated on request.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    start: int
    memory: torch.Tensor
    pieces: tuple[torch.nn.Parameter, ...]
    is_whole: bool
    state_memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def part_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return memory with the layout of ``memory`` as a tensor of the parameter's shape."""
        if self.is_whole:
            return memory.detach().view(self.shape)
        return FlatShard(self.shape, self.start, memory.detach())

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Cut memory that is laid out like ``memory`` into the pieces."""
        return list(torch.split(memory, [piece.numel() for piece in self.pieces]))

    def home(self, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for one kind of state of all pieces."""
        if kind not in self.state_memory:
            self.state_memory[kind] = torch.zeros_like(self.memory, dtype=dtype)
        return self.state_memory[kind]


class ShardedOptimizer:
    """Stateful over an optimizer of pieces.

    Args:
        optimizer: Optimizer whose groups contain the pieces of ``runs``.
        runs: Slices of all trained parameters, group by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[ParameterSlice]) -> None:
        self.optimizer = optimizer
        self.runs = list(runs)
        self._by_path = {escape(run.name): run for run in runs}

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names in place of pieces.

        Raises:
            UnsavableState: The optimizer keeps a value that is neither one number per element of a
                parameter, nor one value per parameter.
            ConfigError: The optimizer got a group of parameters that are not pieces.
        """
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, "params": names}
            for names, group in zip(self._names(), self.optimizer.param_groups, strict=True)
        ]
        state = {
            run.name: {kind: self._part(run, kind) for kind in parameter_state}
            for run in self.runs
            if (parameter_state := self.optimizer.state.get(run.pieces[0]))
        }
        return {"state": state, "param_groups": groups}

    def like(self, path: str) -> torch.Tensor | None:
        """Return the tensor to fill with the state at ``path``, which may not exist yet.

        Args:
            path: Path inside the part, ``state/<parameter>/<name>``.
        """
        place, _, name_and_kind = path.partition("/")
        name, _, kind = name_and_kind.partition("/")
        run = self._by_path.get(name)
        if place != "state" or kind == _COUNT or run is None or run.is_whole:
            return None
        return run.part_of(run.home(kind))

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check that ``load_state_dict`` accepts a saved state. Nothing is loaded.

        Raises:
            ValueError: The state belongs to another kind of optimizer, to other parameters, or to
                groups that this optimizer does not have.
            ConfigError: The optimizer got a group that is not trained here.
        """
        require_compatible_optimizer(self.optimizer, state_dict)
        self._matched(state_dict)

    def _matched(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the saved group of each group of the optimizer."""
        names = self._names()
        saved_groups = state_dict["param_groups"]
        require_same_names(
            state_dict["state"], [name for group in names for name in group], partial=True
        )
        return matched_groups(names, saved_groups, self.optimizer.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each parameter by its name.

        Raises:
            ValueError: The saved names are not this optimizer's.
            RuntimeError: A shape is not the parameter's.
        """
        groups = self._matched(state_dict)
        state = state_dict["state"]
        for run in self.runs:
            saved_state = state.get(run.name) or {}
            for piece in run.pieces:
                self.optimizer.state.pop(piece, None)
            for kind, value in saved_state.items():
                self._load_piece_state(run, kind, value)
        for group, saved_group in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: option for name, option in saved_group.items() if name != "params"})

    def steady(self) -> Iterator[torch.Tensor]:
        """Yield the memory that only a step of the optimizer changes."""
        yield from (run.memory for run in self.runs)
        for parameter_state in self.optimizer.state.values():
            yield from (value for value in parameter_state.values() if torch.is_tensor(value))

    def _names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for run in self.runs:
            names[run.group].append(run.name)
        require_all_named(self.optimizer, names)
        return names

    def _part(self, run: ParameterSlice, kind: str) -> Any:
        """Return one kind of state of a parameter, and move this state into contiguous memory."""
        values = [self.optimizer.state[piece].get(kind) for piece in run.pieces]
        first = values[0]
        if not torch.is_tensor(first):
            return first
        if kind == _COUNT or first.dim() == 0:
            return first.detach().clone()
        if any(value.shape != piece.shape for value, piece in zip(values, run.pieces, strict=True)):
            raise UnsavableState(
                f"the optimizer keeps `{kind}` of shape {tuple(first.shape)} for "
                f"{run.pieces[0].numel()} elements",
                path=f"{run.name}/{kind}",
                hint="use an optimizer that keeps one number for each element, such as AdamW",
            )
        home = run.state_memory.get(kind)
        if home is None or home.dtype != first.dtype:
            home = run.state_memory[kind] = torch.empty_like(run.memory, dtype=first.dtype)
        for piece, value, place in zip(run.pieces, values, run.cut(home), strict=True):
            if value.data_ptr() != place.data_ptr():
                place.copy_(value)
                self.optimizer.state[piece][kind] = place
        return run.part_of(home)

    @torch.no_grad()
    def _load_piece_state(self, run: ParameterSlice, kind: str, value: Any) -> None:
        """Load one kind of saved state into the pieces of a run."""
        if not torch.is_tensor(value) or kind == _COUNT or tuple(value.shape) != run.shape:
            for piece in run.pieces:
                own_value = value.clone() if torch.is_tensor(value) else value
                self.optimizer.state[piece][kind] = own_value
            return
        home = run.state_memory.get(kind)
        if home is None or home.dtype != value.dtype:
            home = run.state_memory[kind] = torch.empty_like(run.memory, dtype=value.dtype)
        source = (
            value.memory
            if isinstance(value, FlatShard)
            else value.reshape(-1).narrow(0, run.start, home.numel())
        )
        if source.data_ptr() != home.data_ptr():
            home.copy_(source)
        for piece, place in zip(run.pieces, run.cut(home), strict=True):
            self.optimizer.state[piece][kind] = place
