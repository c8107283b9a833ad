"""What is replicated stays equal on all ranks: buffers are those of rank 0."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


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
