"""FSDP2 strategy: torch shards parameters, gradients and optimizer state over the ranks."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from resilient.environment import read_integer
from resilient.errors import ConfigError
from resilient.strategies.base import (
    begin_with_rank_0,
    bind_plainly,
    broadcast,
    broadcast_buffers,
    with_group_timeout,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from resilient.strategies.base import BoundModel, OptimizerStepper
    from resilient.strategies.fsdp_options import FsdpOptions


@dataclass(frozen=True, slots=True)
class FsdpStrategy:
    """FSDP2 strategy, which shards the model of rank 0.

    Each module of a class in ``layer_classes`` is gathered and freed as one unit. Each module with
    at least ``min_num_params`` parameters outside inner units is also a unit. All other parameters
    belong to the root.

    Attributes:
        device: Device of this rank.
        options: Sharding options.
    """

    device: torch.device
    options: FsdpOptions
    name: str = "fsdp"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place and return it; optimizers are built after this. Collective.

        Raises:
            ConfigError: The model lacks a class of ``layer_classes``, a parameter is a scalar or
                was not sharded, or the ranks cannot be divided in this way.
        """
        if isinstance(model, FSDPModule):
            return model
        refuse_scalars(model)
        broadcast([*model.parameters(), *model.buffers()])
        self.shard(model, data_mesh(self.device, self.options))
        model.register_forward_pre_hook(begin_with_rank_0)
        return model

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Shard the model over a mesh of one dimension, or of (replicas, ranks of each).

        Raises:
            ConfigError: As for ``prepare``.
        """
        units = units_of(model, self.options)
        for module in [*units, model]:
            self._shard(module, mesh)
        _require_sharded(model)
        self._prefetch([model, *reversed(units)])

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        options = self.options
        on_gpu = self.device.type == "cuda"
        fully_shard(
            module,
            mesh=mesh,
            # With None, torch frees every module but the root, because the backward pass starts
            # there.
            reshard_after_forward=None if options.reshard_after_forward else False,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype_of(options.dtypes.param),
                reduce_dtype=dtype_of(options.dtypes.reduce),
                output_dtype=dtype_of(options.dtypes.output),
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=on_gpu)
            if options.cpu_offload
            else OffloadPolicy(),
        )

    def _prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the prefetching; ``modules`` are in the order of the forward pass."""
        if self.options.forward_prefetch:
            for module, next_module in pairwise(cast("Sequence[FSDPModule]", modules)):
                module.set_modules_to_forward_prefetch([next_module])
        if self.options.backward_prefetch == "no_prefetch":
            for module in cast("Sequence[FSDPModule]", modules):
                # Prefetch the module itself, which is already gathered; an empty list selects
                # torch's default.
                module.set_modules_to_backward_prefetch([module])

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the sharded model and its stepper."""
        return bind_plainly(self, model, optimizer, updates)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself, because it was sharded in place."""
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which gradients stay whole on each rank, and are not reduced."""
        sharded = cast("FSDPModule", model)
        sharded.set_requires_gradient_sync(requires_gradient_sync=False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(requires_gradient_sync=True)

    def align(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to every rank, as the next forward pass would. Collective."""
        broadcast_buffers(model)


def dtype_of(name: str | None) -> torch.dtype | None:
    """Return torch's dtype of a name."""
    return None if name is None else cast("torch.dtype", getattr(torch, name))


def data_mesh(device: torch.device, options: FsdpOptions) -> DeviceMesh:
    """Return the mesh that a model is sharded over: all ranks, or (replicas, ranks of each).

    Raises:
        ConfigError: The ranks cannot be divided in this way.
    """
    ranks = dist.get_world_size()
    size = options.shard_size
    if options.hybrid and not size:
        size = read_integer(os.environ, "LOCAL_WORLD_SIZE", 0, least=0) or ranks
    if size in (0, ranks):
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    if size < 1 or ranks % size:
        raise ConfigError(
            f"{ranks} ranks cannot be cut into groups of {size} that each hold the model",
            hint="set `shard_size` in fsdp_config to a divisor of the number of ranks",
        )
    names = ("dp_replicate", "dp_shard")
    return with_group_timeout(
        init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=names)
    )


def units_of(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """Return the modules inside ``model`` that are sharded one by one, inner modules first.

    Raises:
        ConfigError: Modules were requested but there are none.
    """
    classes = _classes_in(model, options)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    sharded_ids: set[int] = set()
    units = []
    for module in reversed(list(model.modules())):  # `modules()` yields outer modules first
        sizes_by_id = {
            id(parameter): parameter.numel()
            for parameter in module.parameters()
            if id(parameter) not in sharded_ids
        }
        by_class = type(module).__name__ in classes
        by_size = 0 < options.min_num_params <= sum(sizes_by_id.values())
        # Lists of modules are never called, so their parameters would never be gathered.
        by_size = by_size and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        if (
            module is not model
            and sizes_by_id
            and (by_class or by_size)
            and _is_alone(module, uses)
        ):
            units.append(module)
            sharded_ids |= set(sizes_by_id)
    if options.wrap and not units:
        raise ConfigError(
            "`auto_wrap` found no module to shard by itself",
            hint="name classes in fsdp_transformer_layer_cls_to_wrap, or set fsdp_min_num_params",
        )
    return units


def _classes_in(model: nn.Module, options: FsdpOptions) -> set[str]:
    module_types = {type(module).__name__ for module in model.modules()}
    unknown = sorted(set(options.layer_classes) - module_types)
    if unknown:
        raise ConfigError(
            f"no module of the model is a {', '.join(unknown)}; it has "
            f"{', '.join(sorted(module_types))}",
            hint="name classes of the model in fsdp_transformer_layer_cls_to_wrap",
        )
    if options.layer_classes or not options.wrap or options.min_num_params:
        return set(options.layer_classes)
    # Layer classes that a Transformers model names itself.
    return module_types & set(getattr(model, "_no_split_modules", None) or ())


def _is_alone(module: nn.Module, uses: Counter[int]) -> bool:
    """Return whether ``module`` shares no parameter with other modules; sharding would untie it."""
    inside = Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )
    return all(uses[count_inside] == count for count_inside, count in inside.items())


def refuse_scalars(model: nn.Module) -> None:
    """Raise if a parameter is a scalar, because FSDP cuts the first dimension."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"parameter `{name}` is a scalar, which cannot be sharded",
                hint="give it the shape (1,), or train with parallelism='ddp'",
            )


def _require_sharded(model: nn.Module) -> None:
    """Raise if a parameter is not sharded, because its replicas would diverge without an error."""
    from torch.distributed.tensor import DTensor

    plain = [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]
    if plain:
        raise ConfigError(f"{len(plain)} parameters were not sharded, {plain[0]} among them")
