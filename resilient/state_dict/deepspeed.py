"""State of a DeepSpeed engine by parameter name, in the same form as the state of torch objects.

Source: DeepSpeed 0.19.8. ZeRO 1 and 2 join the parameters of a group into one vector, and give each
rank a partition of this vector. A partition may begin inside a parameter. ``param._hp_mapping`` has
the range of a parameter that belongs to the rank. ZeRO 3 cuts each parameter into equal partitions.
``optimizer.grad_position`` has the start of each partition. Without ZeRO, half-precision training
keeps whole full-precision copies of the weights. In every case the saved state has the
full-precision weights. A load fills these weights, and rounds them to the weights of the model.

A rank's partitions are runs of elements of named tensors. A save writes these runs directly,
without a gather and without the padding of a partition. The checkpoint therefore does not depend on
the ZeRO stage or on the number of ranks. DDP, FSDP and single processes can load such a checkpoint,
and DeepSpeed can load their checkpoints. ``tests/process/test_zero_resharding.py`` verifies this
property.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError, UnsavableState
from resilient.state_dict.flatten import escape
from resilient.state_dict.optimizer import (
    group_sizes,
    matched_groups,
    require_all_named,
    require_compatible_optimizer,
    require_same_names,
)
from resilient.state_dict.sharding import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class ParameterLocation:
    """Place of this rank's part of one trained parameter.

    Attributes:
        name: Name of the parameter in the model.
        group: Number of its parameter group.
        shape: Shape of the whole parameter.
        flat: Tensor that the inner optimizer trains, and the key of its state.
        start: First element of the whole parameter that this rank has.
        offset: Position of that element in ``flat``.
        count: Number of elements on this rank; may be 0.
        is_whole: Whether every rank has the whole parameter.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    flat: torch.Tensor
    start: int
    offset: int
    count: int
    is_whole: bool = False

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter's part of a tensor that is laid out as ``self.flat``."""
        if self.is_whole:
            return flat.detach()
        memory = flat.detach().reshape(-1).narrow(0, self.offset, self.count)
        return FlatShard(self.shape, self.start, memory)


def stage_of(engine: Any) -> int:
    """Return the ZeRO stage of an engine, 0 for none."""
    return int(engine.zero_optimization_stage())


def inner_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside DeepSpeed's optimizer; the inner optimizer makes the steps."""
    return engine.basic_optimizer  # type: ignore[no-any-return]  # DeepSpeed is untyped


def parameter_locations(engine: Any) -> list[ParameterLocation]:
    """Return the locations of all parameters that the engine trains, group by group.

    Raises:
        ConfigError: The engine stores the parameters in an unknown way.
    """
    optimizer = engine.optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for find in _FINDERS:
        locations = find(optimizer, names)
        if locations is not None:
            _refuse_model_parallel(engine)
            return list(locations)
    raise ConfigError(
        f"DeepSpeed's {type(optimizer).__qualname__} keeps its state in an unknown way",
        hint="use ZeRO 0 to 3 with an optimizer of torch",
    )


def _refuse_model_parallel(engine: Any) -> None:
    if engine.dp_world_size != torch.distributed.get_world_size() or engine.has_moe_layers:
        raise ConfigError(
            f"DeepSpeed distributes this model over {engine.dp_world_size} ranks of "
            f"{torch.distributed.get_world_size()}: only plain data parallelism can be saved",
            hint="use ZeRO without model, pipeline, sequence or expert parallelism",
        )


Names = dict[int, str]


def _without_copies(optimizer: Any, names: Names) -> Iterator[ParameterLocation] | None:
    """Find parameters without full-precision copies (ZeRO 0 in fp32)."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    return (
        _whole(names[id(parameter)], number, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    )


def _copied(optimizer: Any, names: Names) -> Iterator[ParameterLocation] | None:
    """Find whole full-precision copies (ZeRO 0 in bf16 or fp16)."""
    copies = getattr(optimizer, "fp32_groups", None)
    if copies is None:
        return None
    return (
        _whole(names[id(low)], number, full)
        for number, pair in enumerate(zip(optimizer.fp16_groups, copies, strict=True))
        for low, full in zip(*pair, strict=True)
    )


def _whole(name: str, group: int, full: torch.Tensor) -> ParameterLocation:
    return ParameterLocation(
        name, group, tuple(full.shape), full, 0, 0, full.numel(), is_whole=True
    )


def _partitioned(optimizer: Any, names: Names) -> Iterator[ParameterLocation] | None:
    """Find ranges of the flat vector that joins the parameters of a group (ZeRO 1 and 2)."""
    for low, full in _LINES:
        if hasattr(optimizer, low) and hasattr(optimizer, full):
            lines = zip(getattr(optimizer, low), getattr(optimizer, full), strict=True)
            return (
                _on_line(names[id(parameter)], number, parameter, flat)
                for number, (group, flat) in enumerate(lines)
                for parameter in group
            )
    return None


_LINES = (
    ("bit16_groups", "single_partition_of_fp32_groups"),
    ("bf16_groups", "fp32_groups_flat_partition"),
)


def _on_line(name: str, group: int, low: Any, flat: torch.Tensor) -> ParameterLocation:
    shape = tuple(low.shape)
    if low._hp_mapping is None:  # noqa: SLF001 - where DeepSpeed's own checkpoints look, too
        return ParameterLocation(name, group, shape, flat, 0, 0, 0)
    mapping = low._hp_mapping  # noqa: SLF001
    low_fragment, high_fragment = mapping.lp_fragment_address, mapping.hp_fragment_address
    return ParameterLocation(
        name, group, shape, flat, low_fragment.start, high_fragment.start, low_fragment.numel
    )


def _partitioned_separately(optimizer: Any, names: Names) -> Iterator[ParameterLocation] | None:
    """Find equal partitions of each parameter (ZeRO 3)."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return None
    if getattr(optimizer, "swap_optimizer", False):
        raise ConfigError(
            "DeepSpeed keeps the optimizer's state on NVMe, where it cannot be saved from",
            hint='offload it to the CPU: "offload_optimizer": {"device": "cpu"}',
        )
    return (
        _slice(optimizer, names[id(parameter)], parameter)
        for group in optimizer.fp16_groups
        for parameter in group
    )


def _slice(optimizer: Any, name: str, parameter: Any) -> ParameterLocation:
    sub_group, offset, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start, count = slice_of(parameter, length)
    group = optimizer.sub_group_to_group_id[sub_group]
    flat = optimizer.fp32_partitioned_groups_flat[sub_group]
    return ParameterLocation(name, group, tuple(parameter.ds_shape), flat, start, offset, count)


def slice_of(parameter: Any, length: int) -> tuple[int, int]:
    """Return (first element, elements) of this rank's partition, without its padding."""
    start = min(torch.distributed.get_rank() * length, parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


_FINDERS: tuple[Callable[[Any, Names], Iterator[ParameterLocation] | None], ...] = (
    _without_copies,
    _partitioned_separately,
    _partitioned,
    _copied,
)


def refresh(engine: Any) -> None:
    """Round the model's weights from the full-precision weights. Collective."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        _refresh_slices(optimizer)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for pair in pairs:
            for low, full in zip(*pair, strict=True):
                low.data.copy_(full.data)


def _refresh_slices(optimizer: Any) -> None:
    # Use the order of DeepSpeed's step: free the gathered parameters, round, then gather the small
    # parameters that stay whole.
    optimizer.parameter_offload.partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()


_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class ZeroModel:
    """Stateful over the model of a DeepSpeed engine, of any ZeRO stage.

    Args:
        engine: First result of ``deepspeed.initialize``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        """Return full-precision weights and all other state by their names in the model."""
        parameter_by_name = dict(self._engine.module.named_parameters())
        locations = {
            id(parameter_by_name[home.name]): home.part_of(home.flat)
            for home in parameter_locations(self._engine)
        }
        # Tied parameters have several names and must stay one tensor.
        part_by_id: dict[int, Any] = {}
        state = {}
        for name, value in self._engine.module.state_dict(keep_vars=True).items():
            if id(value) not in part_by_id:
                part_by_id[id(value)] = (
                    locations[id(value)] if id(value) in locations else _frozen(value)
                )
            state[name] = part_by_id[id(value)]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state, and round the model's weights from it. Collective.

        Raises:
            ValueError: The names are not the model's.
            RuntimeError: A shape is not the model's.
        """
        live = self.state_dict()
        if live.keys() != state_dict.keys():
            differ = sorted(live.keys() ^ state_dict.keys())
            raise ValueError(f"names differ: {', '.join(differ[:5])} ({len(differ)} in all)")
        for name, value in live.items():
            if torch.is_tensor(value):
                _fill(value, state_dict[name])
        # Modules load their own non-tensor state.
        plain_values = {
            name: state_dict[name] for name, tensor in live.items() if not torch.is_tensor(tensor)
        }
        if plain_values:
            self._engine.module.load_state_dict(plain_values, strict=False)
        refresh(self._engine)


def _frozen(value: Any) -> Any:
    """Return a value that no optimizer trains, whole or as a partition of a parameter."""
    if not torch.is_tensor(value) or not hasattr(value, "ds_tensor"):
        return value.detach() if torch.is_tensor(value) else value
    tensor: Any = value
    start, count = slice_of(tensor, tensor.ds_tensor.numel())
    return FlatShard(tuple(tensor.ds_shape), start, tensor.ds_tensor.detach().narrow(0, 0, count))


@torch.no_grad()
def _fill(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy a loaded tensor to its live memory, unless the load already filled this memory."""
    if tuple(live.shape) != tuple(saved.shape):
        raise RuntimeError(
            f"shape {tuple(saved.shape)} was saved, but the shape is {tuple(live.shape)} here"
        )
    if not isinstance(live, FlatShard):
        live.copy_(saved)
        return
    if isinstance(saved, FlatShard):
        source = saved.memory
    else:
        source = saved.reshape(-1).narrow(0, live.start, live.memory.numel())
    if source.data_ptr() != live.memory.data_ptr():
        live.memory.copy_(source)


class ZeroOptimizer:
    """Stateful over the optimizer of a DeepSpeed engine, keyed by parameter name.

    Its state has the form of :class:`~resilient.state_dict.optimizer.NamedOptimizer`'s, plus the
    fp16 loss scale and the engine's counters.

    Args:
        engine: First result of ``deepspeed.initialize``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._homes: list[ParameterLocation] = []
        self._by_path: dict[str, ParameterLocation] = {}
        self._sizes: list[int] = []
        self._arriving: dict[tuple[int, str], torch.Tensor] = {}
        self._find_locations()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, which makes the steps."""
        return inner_optimizer(self._engine)

    def _find_locations(self) -> None:
        """Find all locations; search again if groups were added or extended."""
        sizes = group_sizes(self.optimizer)
        if sizes != self._sizes:
            self._homes, self._sizes = parameter_locations(self._engine), sizes
            self._by_path = {escape(home.name): home for home in self._homes}

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names in place of parameters.

        Raises:
            UnsavableState: The optimizer keeps a value that is neither one number per element of a
                parameter, nor one value per parameter.
            ConfigError: The optimizer got a group that the engine does not train.
        """
        self._find_locations()
        state = {
            home.name: {kind: _part(home, kind, value) for kind, value in parameter_state.items()}
            for home in self._homes
            if (parameter_state := self.optimizer.state.get(home.flat))
        }
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, "params": names}
            for names, group in zip(self._names(), self.optimizer.param_groups, strict=True)
        ]
        engine = {name: getattr(self._engine, name) for name in _COUNTERS}
        scale = _scale_of(self._engine)
        return {
            "state": state,
            "param_groups": groups,
            "engine": engine,
            **({"loss_scale": _numbers(scale)} if scale is not None else {}),
        }

    def like(self, path: str) -> torch.Tensor | None:
        """Return the tensor to fill with the state at ``path``; the state may not exist yet.

        Args:
            path: Path inside the part, ``state/<parameter>/<name>``.
        """
        place, _, name_and_kind = path.partition("/")
        name, _, kind = name_and_kind.partition("/")
        home = self._by_path.get(name)
        if place != "state" or kind == "step" or home is None or home.is_whole:
            return None
        return home.part_of(self._state_memory(home, kind))

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check that ``load_state_dict`` accepts a saved state. Nothing is loaded.

        Raises:
            ValueError: The state belongs to another kind of optimizer, to other parameters, or to
                groups that this optimizer does not have.
            ConfigError: The optimizer got a group that is not trained here.
        """
        require_compatible_optimizer(self.optimizer, state_dict)
        self._find_locations()
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
            ValueError: The saved names are not this optimizer's, or parameters that ZeRO counts
                together have different numbers of steps.
            ConfigError: The optimizer got a group that the engine does not train.
        """
        self._find_locations()
        groups = self._matched(state_dict)
        state = state_dict["state"]
        by_flat = sorted(self._homes, key=lambda home: id(home.flat))
        for _, locations in groupby(by_flat, key=lambda home: id(home.flat)):
            self._load_flat(list(locations), state)
        for group, saved_group in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        self._arriving = {}
        # Reset DeepSpeed's cached references into the state.
        if hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            self._engine.optimizer._hp_optimizer_states_linked = False  # noqa: SLF001
        for name, count in state_dict.get("engine", {}).items():
            setattr(self._engine, name, count)
        scale = _scale_of(self._engine)
        if scale is not None:
            vars(scale).update(state_dict.get("loss_scale", {}))

    def steady(self) -> Iterator[torch.Tensor]:
        """Yield the memory that only a step of the optimizer changes."""
        yield from (home.flat.detach() for home in self._homes)
        for parameter_state in self.optimizer.state.values():
            yield from (value for value in parameter_state.values() if torch.is_tensor(value))

    def _names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for home in self._homes:
            names[home.group].append(home.name)
        require_all_named(self.optimizer, names)
        return names

    def _state_memory(self, home: ParameterLocation, kind: str) -> torch.Tensor:
        """Return the memory of one kind of state for all parameters in ``home.flat``."""
        parameter_state = self.optimizer.state.get(home.flat, {})
        if kind in parameter_state:
            return parameter_state[kind]  # type: ignore[no-any-return]  # torch leaves it untyped
        key = (id(home.flat), kind)
        if key not in self._arriving:
            self._arriving[key] = torch.zeros_like(home.flat.detach())
        return self._arriving[key]

    def _load_flat(self, locations: Sequence[ParameterLocation], state: Mapping[str, Any]) -> None:
        """Load the state of parameters that share one memory."""
        saved_states = {home.name: state[home.name] for home in locations if state.get(home.name)}
        flat_state: dict[str, Any] = {}
        for kind in dict.fromkeys(kind for moments in saved_states.values() for kind in moments):
            having = [home for home in locations if kind in saved_states.get(home.name, {})]
            values = [saved_states[home.name][kind] for home in having]
            if all(map(_is_elementwise, [kind] * len(having), having, values)):
                room = self._state_memory(locations[0], kind)
                if len(having) < len(locations):
                    room.zero_()  # ZeRO uses zeros for parameters without a gradient so far
                for home, value in zip(having, values, strict=True):
                    _fill(home.part_of(room), value)
                flat_state[kind] = room
            else:
                flat_state[kind] = _common_value(kind, having, values)
        if flat_state:
            self.optimizer.state[locations[0].flat] = flat_state
        else:
            self.optimizer.state.pop(locations[0].flat, None)


def _part(home: ParameterLocation, kind: str, value: Any) -> Any:
    """Return a parameter's part of a state that is stored for several parameters together."""
    if not torch.is_tensor(value):
        return value
    if value.shape == home.flat.shape and kind != "step":
        return home.part_of(value)
    if value.numel() == 1:
        # Return a copy, because an optimizer with one step counter per parameter increments each
        # counter.
        return value.detach().clone()
    raise UnsavableState(
        f"the optimizer keeps `{kind}` of shape {tuple(value.shape)} for {home.flat.numel()} "
        "elements, which cannot be split by parameter",
        path=f"{home.name}/{kind}",
        hint="use an optimizer that keeps one number for each element, such as AdamW",
    )


def _is_elementwise(kind: str, home: ParameterLocation, value: Any) -> bool:
    return kind != "step" and torch.is_tensor(value) and tuple(value.shape) == home.shape


def _common_value(kind: str, locations: Sequence[ParameterLocation], values: Sequence[Any]) -> Any:
    """Return the value that all parameters have in common.

    Raises:
        ValueError: The values differ.
    """
    for home, value in zip(locations, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"ZeRO keeps one `{kind}` for `{locations[0].name}` and `{home.name}`, which have "
                f"{values[0]} and {value}"
            )
    return values[0].clone() if torch.is_tensor(values[0]) else values[0]


def _scale_of(engine: Any) -> Any:
    """Return the object with the loss scale of fp16 training, or None."""
    if not engine.fp16_enabled():
        return None
    optimizer = engine.optimizer
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _numbers(scale: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(scale).items() if type(value) in (bool, int, float)}
