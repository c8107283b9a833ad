"""What is replicated stays equal on all ranks: buffers are those of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0. Collective."""
    with torch.no_grad():
        for tensor in tensors:
            dist.broadcast(_local(tensor.detach()), src=0)


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as the next forward pass would. Collective."""
    for buffer in model.buffers():
        dist.broadcast(_local(buffer), src=0)


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
