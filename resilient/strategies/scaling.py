"""One scale of fp16 for ranks that hold a model together: all skip a step, or none does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from resilient.strategies.strategy import Updates


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


def scale_jointly(updates: Updates, device: torch.device) -> None:
    """Let all ranks of the default group scale as one, if these updates scale at all."""
    if updates.scaler is not None:
        updates.scaler = JointScaler(device.type)
