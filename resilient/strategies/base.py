"""Protocol of parallelism strategies, the strategy for a single device, and shared helpers.

Buffers stay equal on all ranks, because each forward pass of training starts with the buffers of
rank 0. If a strategy creates a process group of only some ranks, this group gets the timeout of the
default group. Without an explicit timeout, torch ignores ``ddp_timeout`` and uses its default: 10
minutes under NCCL and 30 minutes under gloo. To read and set this timeout, the module needs private
names of torch. All ranks that train one model use the same fp16 loss scale, so they skip the same
steps after an overflow.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer


class OptimizerStepper(Protocol):
    """Backward pass and optimizer step, with precision, loss scaling and clipping."""

    scaler: Any
    """Loss scaler, whose state is saved; None without one."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of a micro-batch; gradients add up."""

    def clip(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Clip gradients and return their total norm before clipping, a scalar tensor.

        If a stepper clips only in ``step``, it fills the tensor there.
        """

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; return False if the step was skipped after an fp16 overflow."""

    def zero_grad(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Free the gradients of the last step.

        Args:
            optimizer: Optimizer that made the step.
            parameters: Parameters of the model. The optimizer may hold only a part of them, and
                the others get gradients too.
        """


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model and its optimizer, ready for training.

    Attributes:
        model: Model for the forward passes of training.
        updates: Stepper of the optimizer.
        parts: ``model`` and ``optimizer``, as they are saved and loaded.
    """

    model: nn.Module
    updates: OptimizerStepper
    parts: dict[str, Part]


def bind_plainly(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper
) -> BoundModel:
    """Return a bound model whose parameters are the optimizer's own."""
    plain_model = strategy.unwrap(model)
    parts = {"model": Part(plain_model), "optimizer": Part(NamedOptimizer(plain_model, optimizer))}
    return BoundModel(model, updates, parts)


class Strategy(Protocol):
    """Distribution of a model over ranks."""

    @property
    def name(self) -> str:
        """Name of the strategy in a checkpoint."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return ``model``, already on its device, wrapped for training. Collective."""

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Bind the result of ``prepare`` and an optimizer of its parameters. Collective.

        Args:
            model: Result of ``prepare``.
            optimizer: Optimizer created after ``prepare``.
            updates: Stepper of a single process.
        """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside the trained model."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for backward passes that are not the last of their step."""

    def align(self, model: nn.Module) -> None:
        """Make replicated values equal on all ranks, before a save or an evaluation.

        Collective.
        """


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Copy the values of rank 0 to every rank. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(_local(tensor.detach()), src=0)


def broadcast_buffers(model: nn.Module) -> None:
    """Copy the buffers of rank 0 to every rank, as the next forward pass would. Collective."""
    for buffer in buffers_of(model):
        dist.broadcast(_local(buffer), src=0)


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Return the buffers of a model in an order that all ranks share, faster than ``buffers()``.

    The step cache calls this function at each step, and most models have no buffers.
    """
    modules, pending_modules = dict[int, nn.Module](), [model]
    while pending_modules:
        module = pending_modules.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            pending_modules += [inner for inner in module._modules.values() if inner is not None]  # noqa: SLF001
    buffers = chain.from_iterable(module._buffers.values() for module in modules.values())  # noqa: SLF001
    return [*{id(buffer): buffer for buffer in buffers if buffer is not None}.values()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local memory of a tensor of a mesh; buffers are whole on all ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def begin_with_rank_0(model: nn.Module, _: object) -> None:
    """Start each forward pass of training with the buffers of rank 0, as DDP does.

    Otherwise running statistics would differ between ranks. A run that was saved and resumed would
    then continue from other buffers than an uninterrupted run.
    """
    if torch.is_grad_enabled():
        broadcast_buffers(model)


def group_timeout() -> timedelta:
    """Return the timeout of a collective of all ranks."""
    world_group: Any = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    options = world_group._get_backend(world_group._device_types[0]).options  # noqa: SLF001
    waits: timedelta = options._timeout  # noqa: SLF001
    return waits


def group_among(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Divide the ranks into groups and return this rank's group. Collective.

    Args:
        groups: Groups of ranks; each rank is in one group.
    """
    grouped: Any = dist.new_subgroups_by_enumeration  # untyped
    group: dist.ProcessGroup = grouped(groups, timeout=group_timeout())[0]
    return group


def with_group_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank whose groups all have the timeout of the group of all ranks."""
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(group_timeout(), group)  # noqa: SLF001
    return mesh


class JointScaler(torch.amp.GradScaler):
    """torch's gradient scaler, for which an overflow on one rank is an overflow on all ranks.

    For DTensor gradients torch reduces the overflow flag by the placement of the first gradient. If
    the first layer is replicated and other layers are sharded, torch therefore does not reduce the
    flag.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale, and detect overflows in all shards. Collective."""
        super().unscale_(optimizer)
        infinities: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
        device = torch.device(self._device)
        worst = torch.zeros((), device=device)
        for value in infinities.values():
            worst = torch.maximum(worst, value.to(device))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        for value in infinities.values():
            value.copy_(worst)
        if not infinities:  # a rank without any gradient decides as the other ranks do
            infinities[device] = worst


def scale_jointly(updates: OptimizerStepper, device: torch.device) -> None:
    """Use one scale for all ranks of the default group, if this stepper scales at all."""
    if updates.scaler is not None:
        updates.scaler = JointScaler(device.type)


class SingleStrategy:
    """Training of the model on one device, without changes."""

    name = "single"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the model and its stepper without changes."""
        return bind_plainly(self, model, optimizer, updates)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002 - the seam
        """Return an empty context."""
        return nullcontext()

    def align(self, model: nn.Module) -> None:
        """Do nothing: there is one replica."""
