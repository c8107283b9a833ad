"""FSDP1 strategy: torch shards one flat vector of parameters per wrapped module."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from resilient.errors import ConfigError
from resilient.state_dict.fsdp1 import Fsdp1Model, Fsdp1Optimizer
from resilient.state_dict.snapshot import Part
from resilient.strategies.base import BoundModel, begin_with_rank_0, broadcast, broadcast_buffers
from resilient.strategies.fsdp import data_mesh, dtype_of, refuse_scalars, units_of
from resilient.strategies.module_wrapper import ForwardRedirect, find_redirect, named_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from resilient.strategies.base import OptimizerStepper
    from resilient.strategies.fsdp_options import FsdpOptions

# (mesh dimensions, whether gathered parameters are freed after the forward pass).
_STRATEGIES = {
    (1, True): ShardingStrategy.FULL_SHARD,
    (1, False): ShardingStrategy.SHARD_GRAD_OP,
    (2, True): ShardingStrategy.HYBRID_SHARD,
    (2, False): ShardingStrategy._HYBRID_SHARD_ZERO2,  # noqa: SLF001 - its only name
}
_PREFETCH = {
    "backward_pre": BackwardPrefetch.BACKWARD_PRE,
    "backward_post": BackwardPrefetch.BACKWARD_POST,
    "no_prefetch": None,
}
# torch correctly keeps batch norms in full precision, but emits a warning.
_NORMS_STAY_WHOLE = "Both mixed precision and an auto_wrap_policy were specified"


@dataclass(frozen=True, slots=True)
class Fsdp1Strategy:
    """FSDP1 strategy, which shards the model of rank 0 in the units of ``FsdpStrategy``.

    The mesh has a process group of the ranks that share the model. With hybrid sharding, the mesh
    also has a group of the ranks with the same shard.

    Attributes:
        device: Device of this rank, also FSDP1's ``device_id``.
        options: Sharding options.
    """

    device: torch.device
    options: FsdpOptions
    name: str = "fsdp"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the model in place and return it; optimizers are built after this. Collective.

        Raises:
            ConfigError: The model lacks a class of ``layer_classes``, a parameter is a scalar, a
                vector mixes trained and frozen parameters, or the number of ranks does not fit the
                mesh.
        """
        if find_redirect(model) is not None:
            return model
        refuse_scalars(model)
        units = units_of(model, self.options)
        if not self.options.use_orig_params:
            _refuse_frozen_parts(model, units)
        broadcast([*model.parameters(), *model.buffers()])
        parameters = named_in(model)
        wrapper = self._wrap(model, units)
        wrapper.register_forward_pre_hook(begin_with_rank_0)
        ForwardRedirect(model, wrapper, parameters)
        return model

    def _wrap(self, model: nn.Module, units: Sequence[nn.Module]) -> FullyShardedDataParallel:
        options, unit_ids = self.options, {id(unit) for unit in units}
        mesh = data_mesh(self.device, options)
        if mesh.shape[-1] == 1:
            raise ConfigError(
                "`shard_size`=1 shards nothing: leave it out, or write parallelism='ddp'"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NORMS_STAY_WHOLE)
            return FullyShardedDataParallel(
                model,
                device_mesh=mesh,
                sharding_strategy=_STRATEGIES[mesh.ndim, options.reshard_after_forward],
                cpu_offload=self.offload(),
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in unit_ids),
                backward_prefetch=_PREFETCH[options.backward_prefetch],
                forward_prefetch=options.forward_prefetch,
                mixed_precision=self._precision(),
                device_id=self.device,
                limit_all_gathers=options.limit_all_gathers,
                use_orig_params=options.use_orig_params,
            )

    def offload(self) -> CPUOffload:
        """Return whether FSDP1 moves shards to host memory. Always off on a CPU.

        On a CPU torch would pin that memory for a missing GPU, and fail.
        """
        return CPUOffload(offload_params=self.options.cpu_offload and self.device.type != "cpu")

    def _precision(self) -> MixedPrecision | None:
        dtypes = self.options.dtypes
        if not any(dtypes):
            return None
        return MixedPrecision(
            dtype_of(dtypes.param), dtype_of(dtypes.reduce), dtype_of(dtypes.buffer)
        )

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the sharded model and its stepper.

        Raises:
            ConfigError: The optimizer was created before the model was sharded.
        """
        detour = cast("ForwardRedirect", find_redirect(model))
        wrapper = cast("FullyShardedDataParallel", detour.wrapper)
        parameter_ids = {id(parameter) for parameter in model.parameters()}
        if any(
            id(parameter) not in parameter_ids
            for group in optimizer.param_groups
            for parameter in group["params"]
        ):
            raise ConfigError(
                "the optimizer holds parameters that FSDP1 has made flat since it was built",
                hint="leave it to the trainer, make it in create_optimizer, or write "
                "use_orig_params=True in fsdp_config",
            )
        parts = {
            "model": Part(Fsdp1Model(wrapper)),
            "optimizer": Part(Fsdp1Optimizer(wrapper, optimizer)),
        }
        return BoundModel(model, FlatUpdates(updates, wrapper), parts)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself, whose calls are redirected to the wrapper."""
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which gradients stay whole on each rank, and are not reduced."""
        wrapper = cast(
            "FullyShardedDataParallel", cast("ForwardRedirect", find_redirect(model)).wrapper
        )
        with wrapper.no_sync():
            yield

    def align(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0 to every rank, as the next forward pass would. Collective."""
        broadcast_buffers(model)


class _Scaler(ShardedGradScaler):
    """torch's sharded scaler, which also supports fused optimizers.

    A fused optimizer needs a scalar overflow flag, but torch's scaler returns a vector.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> dict[torch.device, torch.Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf.squeeze(), allow_fp16)


class FlatUpdates:
    """Optimizer steps of each rank over its own flat shards.

    Args:
        plain: Stepper of a single process.
        wrapper: The outermost wrapper.
    """

    def __init__(self, plain: OptimizerStepper, wrapper: FullyShardedDataParallel) -> None:
        self._plain = plain
        self._device: torch.device = cast("torch.device", wrapper.compute_device)
        self._group: Any = wrapper.process_group
        if plain.scaler is not None:
            # An overflow on one rank is an overflow on all ranks.
            plain.scaler = _Scaler(self._device.type)
        self.scaler = plain.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""
        return self._plain.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate."""
        self._plain.backward(loss)

    def clip(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Clip gradients to ``max_norm`` and return their total norm before clipping.

        The norm is a scalar tensor and covers all shards. ``max_norm`` 0 measures without clipping.
        Collective.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        squares = get_total_norm(gradients, foreach=True).to(self._device, torch.float64) ** 2
        dist.all_reduce(squares, group=self._group)
        norm = squares.sqrt().float()
        if max_norm > 0:
            clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
        return norm

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; return False if fp16 gradients overflowed on any rank."""
        return self._plain.step(optimizer)

    def zero_grad(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Free the gradients."""
        self._plain.zero_grad(optimizer, parameters)


def _refuse_frozen_parts(model: nn.Module, units: Collection[nn.Module]) -> None:
    """Raise if a vector would mix trained and frozen parameters."""
    assigned_ids: set[int] = set()
    for unit in [*units, model]:
        unit_parameters = {
            n: parameter
            for n, parameter in unit.named_parameters()
            if id(parameter) not in assigned_ids
        }
        assigned_ids |= {id(value) for value in unit_parameters.values()}
        frozen = [name for name, value in unit_parameters.items() if not value.requires_grad]
        if frozen and len(frozen) < len(unit_parameters):
            raise ConfigError(
                f"`use_orig_params`=False: `{frozen[0]}` is frozen and would lie in one vector "
                "with parameters that are trained",
                hint="write use_orig_params=True in fsdp_config, or freeze whole layers",
            )
