"""Where a DeepSpeed engine keeps the weights that it trains: each parameter's home, by name.

Source: DeepSpeed 0.19.8. ZeRO 1 and 2 lay the parameters of a group end to end and cut the line
in equal partitions, wherever that is; ``param._hp_mapping`` says what of a parameter a rank holds.
ZeRO 3 cuts each parameter in equal partitions; ``optimizer.grad_position`` says where one begins.
Without ZeRO, half-precision training keeps whole copies in full precision. In every case these
full-precision weights are the state; those that the model computes with are rounded from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.state.flat import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """Where this rank keeps its part of one trained parameter.

    Attributes:
        name: of the parameter in the model.
        group: its parameter group's number.
        shape: of the whole parameter.
        flat: what the inner optimizer trains and keeps its state by.
        start: first element of the whole parameter that is kept here.
        offset: where in ``flat`` that one lies.
        count: elements kept here; may be 0.
        is_whole: every rank keeps all of it.
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
    """Return which ZeRO stage an engine trains in, 0 for none."""
    return int(engine.zero_optimization_stage())


def inner_optimizer(engine: Any) -> torch.optim.Optimizer:
    """Return the optimizer that makes the steps, inside DeepSpeed's own."""
    return engine.basic_optimizer  # type: ignore[no-any-return]  # DeepSpeed is untyped


def homes_of(engine: Any) -> list[Home]:
    """Return the homes of all parameters that the engine trains, group by group.

    Raises:
        ConfigError: it keeps them in a way that is not known here.
    """
    optimizer = engine.optimizer
    names = {id(one): name for name, one in engine.module.named_parameters()}
    for find in _FINDERS:
        found = find(optimizer, names)
        if found is not None:
            _refuse_model_parallel(engine)
            return list(found)
    raise ConfigError(
        f"DeepSpeed's {type(optimizer).__qualname__} keeps its state in a way that is not known",
        hint="use ZeRO 0 to 3 with an optimizer of torch",
    )


def _refuse_model_parallel(engine: Any) -> None:
    if engine.dp_world_size != torch.distributed.get_world_size() or engine.has_moe_layers:
        raise ConfigError(
            f"DeepSpeed spreads this model over {engine.dp_world_size} ranks of "
            f"{torch.distributed.get_world_size()}: only plain data parallelism can be saved",
            hint="use ZeRO without model, pipeline, sequence or expert parallelism",
        )


Names = dict[int, str]


def _bare(optimizer: Any, names: Names) -> Iterator[Home] | None:
    """Find parameters that are trained as they are (ZeRO 0 in fp32)."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    return (
        _whole(names[id(one)], number, one)
        for number, group in enumerate(optimizer.param_groups)
        for one in group["params"]
    )


def _copied(optimizer: Any, names: Names) -> Iterator[Home] | None:
    """Find whole full-precision copies (ZeRO 0 in bf16 or fp16)."""
    copies = getattr(optimizer, "fp32_groups", None)
    if copies is None:
        return None
    return (
        _whole(names[id(low)], number, full)
        for number, pair in enumerate(zip(optimizer.fp16_groups, copies, strict=True))
        for low, full in zip(*pair, strict=True)
    )


def _whole(name: str, group: int, full: torch.Tensor) -> Home:
    return Home(name, group, tuple(full.shape), full, 0, 0, full.numel(), is_whole=True)


def _partitioned(optimizer: Any, names: Names) -> Iterator[Home] | None:
    """Find runs of a line on which the parameters of a group lie end to end (ZeRO 1 and 2)."""
    for low, full in _LINES:
        if hasattr(optimizer, low) and hasattr(optimizer, full):
            lines = zip(getattr(optimizer, low), getattr(optimizer, full), strict=True)
            return (
                _on_line(names[id(one)], number, one, flat)
                for number, (group, flat) in enumerate(lines)
                for one in group
            )
    return None


_LINES = (
    ("bit16_groups", "single_partition_of_fp32_groups"),
    ("bf16_groups", "fp32_groups_flat_partition"),
)


def _on_line(name: str, group: int, low: Any, flat: torch.Tensor) -> Home:
    shape = tuple(low.shape)
    if low._hp_mapping is None:  # noqa: SLF001 - where DeepSpeed's own checkpoints look, too
        return Home(name, group, shape, flat, 0, 0, 0)
    mapping = low._hp_mapping  # noqa: SLF001
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Home(name, group, shape, flat, here.start, there.start, here.numel)


def _sliced(optimizer: Any, names: Names) -> Iterator[Home] | None:
    """Find equal partitions of each parameter (ZeRO 3)."""
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return None
    if getattr(optimizer, "swap_optimizer", False):
        raise ConfigError(
            "DeepSpeed keeps the optimizer's state on NVMe, where it cannot be saved from",
            hint='offload it to the CPU: "offload_optimizer": {"device": "cpu"}',
        )
    return (
        _slice(optimizer, names[id(one)], one) for group in optimizer.fp16_groups for one in group
    )


def _slice(optimizer: Any, name: str, one: Any) -> Home:
    sub_group, offset, length = optimizer.grad_position[optimizer.get_param_id(one)]
    start, count = slice_of(one, length)
    group = optimizer.sub_group_to_group_id[sub_group]
    flat = optimizer.fp32_partitioned_groups_flat[sub_group]
    return Home(name, group, tuple(one.ds_shape), flat, start, offset, count)


def slice_of(one: Any, length: int) -> tuple[int, int]:
    """Return (first element, elements) of this rank's partition, without what pads it."""
    start = min(torch.distributed.get_rank() * length, one.ds_numel)
    return start, min(length, one.ds_numel - start)


_FINDERS: tuple[Callable[[Any, Names], Iterator[Home] | None], ...] = (
    _bare,
    _sliced,
    _partitioned,
    _copied,
)


def refresh(engine: Any) -> None:
    """Round the weights that the model computes with from the full-precision ones. Collective."""
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
    # As the end of DeepSpeed's step does: what is gathered is freed, then rounded, then the small
    # parameters that stay whole are gathered anew.
    optimizer.parameter_offload.partition_all_parameters()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)  # noqa: SLF001
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    optimizer.invalidate_secondary_tensor()
