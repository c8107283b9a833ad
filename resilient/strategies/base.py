"""Strategy protocol, single device, shared helpers.

The seam for how a model is parallel.

What is replicated stays equal on all ranks: buffers are those of rank 0.

Process groups of some of the ranks, which wait as long as that of all of them does.

To a group that is made without saying so torch gives its own default, ten minutes under NCCL and
thirty under gloo, whatever the group of all ranks was told (``ddp_timeout``). How long a group
waits torch tells and lets change by nothing but names that begin with an underscore.

One scale of fp16 for ranks that hold a model together: all skip a step, or none does.

One process, one device.
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
    """How a step is made: in which precision, and by whom."""

    scaler: Any
    """What scales the loss and is saved, or None."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass."""

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagate the loss of a micro-batch; gradients add up."""

    def clip(
        self, optimizer: Optimizer, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> torch.Tensor:
        """Clip gradients and return their total norm before (a scalar tensor).

        Who clips only in ``step`` fills the tensor there.
        """

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer; False when fp16 gradients overflowed and it was skipped."""

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Free the gradients of the step that was made."""


@dataclass(frozen=True, slots=True)
class BoundModel:
    """A model and its optimizer, ready to be trained.

    Attributes:
        model: forward passes of training go through it.
        updates: makes the steps.
        parts: ``model`` and ``optimizer``, as they are saved and loaded.
    """

    model: nn.Module
    updates: OptimizerStepper
    parts: dict[str, Part]


def bind_plainly(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper
) -> BoundModel:
    """Return a model whose parameters are the optimizer's own."""
    plain = strategy.unwrap(model)
    parts = {"model": Part(plain), "optimizer": Part(NamedOptimizer(plain, optimizer))}
    return BoundModel(model, updates, parts)


class Strategy(Protocol):
    """How a model is spread over ranks."""

    @property
    def name(self) -> str:
        """What a checkpoint says of it."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return ``model``, already on its device, wrapped for training. Collective."""

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Join what ``prepare`` returned and an optimizer of its parameters. Collective.

        Args:
            model: what ``prepare`` returned.
            optimizer: made after that.
            updates: how one process alone would make its steps.
        """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside the one that is trained."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context whose backward passes are not the last of their step."""

    def align(self, model: nn.Module) -> None:
        """Make what is replicated equal on all ranks, before it is saved or evaluated.

        Collective.
        """


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(_local(tensor.detach()), src=0)


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as the next forward pass would. Collective."""
    for buffer in buffers_of(model):
        dist.broadcast(_local(buffer), src=0)


def buffers_of(model: nn.Module) -> list[torch.Tensor]:
    """Return what ``model.buffers()`` gives, in some order that all ranks share, in less time.

    Asked at each step that is held, and most models have none.
    """
    modules, left = dict[int, nn.Module](), [model]
    while left:
        one = left.pop()
        if id(one) not in modules:
            modules[id(one)] = one
            left += [inner for inner in one._modules.values() if inner is not None]  # noqa: SLF001
    found = chain.from_iterable(one._buffers.values() for one in modules.values())  # noqa: SLF001
    return [*{id(one): one for one in found if one is not None}.values()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory here of a tensor that a mesh knows of; buffers are whole on all ranks."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def begin_with_rank_0(model: nn.Module, _: object) -> None:
    """Begin each forward pass of training with the buffers of rank 0, as DDP does.

    Otherwise running statistics would differ between ranks, and a run that was saved at another
    step than an unbroken one would go on from other buffers.
    """
    if torch.is_grad_enabled():
        broadcast_buffers(model)


def group_timeout() -> timedelta:
    """Return how long a collective of all ranks may take."""
    everyone: Any = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    options = everyone._get_backend(everyone._device_types[0]).options  # noqa: SLF001
    waits: timedelta = options._timeout  # noqa: SLF001
    return waits


def group_among(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Cut the ranks into groups and return this rank's. Collective.

    Args:
        groups: ranks; each is in one of them.
    """
    grouped: Any = dist.new_subgroups_by_enumeration  # untyped
    group: dist.ProcessGroup = grouped(groups, timeout=group_timeout())[0]
    return group


def with_group_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank, all groups of which wait as long as that of all ranks."""
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(group_timeout(), group)  # noqa: SLF001
    return mesh


class JointScaler(torch.amp.GradScaler):
    """torch's, but an overflow in the shard of one rank is one for all ranks.

    Of gradients that are DTensors torch reduces what it found as the first of them is placed:
    over no rank, where the first layer is replicated and others are cut.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide gradients by the scale, and look for overflows in all shards. Collective."""
        super().unscale_(optimizer)
        found: dict[Any, torch.Tensor] = self._found_inf_per_device(optimizer)
        device = torch.device(self._device)
        worst = torch.zeros((), device=device)
        for one in found.values():
            worst = torch.maximum(worst, one.to(device))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        for one in found.values():
            one.copy_(worst)
        if not found:  # a rank without any gradient decides as the others do
            found[device] = worst


def scale_jointly(updates: OptimizerStepper, device: torch.device) -> None:
    """Let all ranks of the default group scale as one, if these updates scale at all."""
    if updates.scaler is not None:
        updates.scaler = JointScaler(device.type)


class SingleStrategy:
    """Trains the model as it is."""

    name = "single"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the model as it is and what makes its steps."""
        return bind_plainly(self, model, optimizer, updates)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002 - the seam
        """Return an empty context."""
        return nullcontext()

    def align(self, model: nn.Module) -> None:
        """Do nothing: there is one replica."""
