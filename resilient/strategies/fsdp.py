"""Parameters, gradients and optimizer state spread over ranks by torch's FSDP2."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from resilient.errors import ConfigError
from resilient.strategies.buffers import begin_with_rank_0, broadcast, broadcast_buffers
from resilient.strategies.strategy import bind_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from resilient.strategies.strategy import Bound, Updates


@dataclass(frozen=True, slots=True)
class FsdpStrategy:
    """FSDP2 over all ranks; shards are cut from what rank 0 holds.

    Every module of one of ``layer_classes``, or with at least ``min_num_params`` parameters that
    no module inside it has taken, is gathered and freed as one; what is left belongs to the root.

    Attributes:
        device: where this rank's shards are.
        layer_classes: names of classes of modules to shard one by one.
        min_num_params: see above; 0 shards by class alone.
        reshard_after_forward: free gathered parameters between forward and backward.
    """

    device: torch.device
    layer_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    reshard_after_forward: bool = True
    name: str = "fsdp"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place and return it; optimizers are built after this. Collective.

        Raises:
            ConfigError: a class of ``layer_classes`` is nowhere in the model, a parameter is a
                scalar, or one is not sharded afterwards.
        """
        if isinstance(model, FSDPModule):
            return model
        _refuse_scalars(model)
        broadcast([*model.parameters(), *model.buffers()])
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for module in self._units(model):
            self._shard(module, mesh)
        self._shard(model, mesh)
        _require_sharded(model)
        model.register_forward_pre_hook(begin_with_rank_0)
        return model

    def _shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        # None: all but the root, which the backward pass needs at once.
        keep = None if self.reshard_after_forward else False
        fully_shard(module, mesh=mesh, reshard_after_forward=keep)

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules inside ``model`` to shard one by one, inner ones first."""
        known = {type(module).__name__ for module in model.modules()}
        unknown = sorted(set(self.layer_classes) - known)
        if unknown:
            raise ConfigError(
                f"no module of the model is a {', '.join(unknown)}; "
                f"it has {', '.join(sorted(known))}",
                hint="name classes of the model in fsdp_transformer_layer_cls_to_wrap",
            )
        uses = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
        taken: set[int] = set()
        units = []
        for module in reversed(list(model.modules())):  # inner modules come after outer ones
            own = {id(one): one.numel() for one in module.parameters() if id(one) not in taken}
            by_class = type(module).__name__ in self.layer_classes
            by_size = 0 < self.min_num_params <= sum(own.values())
            if module is not model and own and (by_class or by_size) and _is_alone(module, uses):
                units.append(module)
                taken |= set(own)
        return units

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: Updates) -> Bound:
        """Return the sharded model and what makes its steps."""
        return bind_plainly(self, model, optimizer, updates)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself: it was sharded in place."""
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
        """Give every rank the buffers of rank 0, as the next forward pass would. Collective."""
        broadcast_buffers(model)


def _is_alone(module: nn.Module, uses: Counter[int]) -> bool:
    """Say whether no parameter of ``module`` is tied to one outside: sharding would untie them."""
    inside = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
    return all(uses[one] == count for one, count in inside.items())


def _refuse_scalars(model: nn.Module) -> None:
    for name, one in model.named_parameters():
        if one.dim() == 0:
            raise ConfigError(
                f"parameter `{name}` is a scalar, which cannot be sharded",
                hint="give it the shape (1,), or train with parallelism='ddp'",
            )


def _require_sharded(model: nn.Module) -> None:
    """Raise unless every parameter is spread over ranks: never train plain replicas unnoticed."""
    from torch.distributed.tensor import DTensor

    plain = [name for name, one in model.named_parameters() if not isinstance(one, DTensor)]
    if plain:
        raise ConfigError(f"{len(plain)} parameters were not sharded, {plain[0]} among them")
