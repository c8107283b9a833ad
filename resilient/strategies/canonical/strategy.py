"""Strategy of replicas that sum gradients over micro-batches in one fixed tree.

The tree depends only on the number of micro-batches of a step. Training therefore gives equal bits
at any world size.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.state_dict.optimizer import ShardedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.strategies.base import BoundModel, bind_plainly, broadcast
from resilient.strategies.canonical.checks import refuse_layouts
from resilient.strategies.canonical.reducer import GradientReducer
from resilient.strategies.canonical.tree_reduce import WINDOW_BYTES
from resilient.strategies.canonical.updates import ReplicaUpdates, ShardUpdates, cut_optimizer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from resilient.strategies.base import OptimizerStepper


@dataclass(frozen=True, slots=True)
class CanonicalStrategy:
    """Strategy that gives equal bits at any world size; replicas start as copies of rank 0.

    Attributes:
        device: Device of this rank's replica.
        rank: This rank.
        ranks: Number of ranks.
        micro_batches: Micro-batches of a step, over all ranks.
        shards_optimizer: Whether each rank keeps and steps only a share of the optimizer.
        window_bytes: Bytes of gradients that are exchanged at once.
    """

    device: torch.device
    rank: int
    ranks: int
    micro_batches: int
    shards_optimizer: bool = False
    window_bytes: int = WINDOW_BYTES
    name: str = "canonical"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Copy the parameters and buffers of rank 0 to every rank; return the model. Collective.

        Raises:
            ConfigError: A parameter or its gradients are not dense in memory.
        """
        if self.shards_optimizer:
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()
        refuse_layouts(model)
        if self.ranks > 1:
            broadcast([*model.parameters(), *model.buffers()])
        return model

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: OptimizerStepper) -> BoundModel:
        """Return the model and its stepper.

        Raises:
            ConfigError: The optimizer cannot be sharded.
        """
        trained_parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        reducer = GradientReducer(
            trained_parameters, self.micro_batches, self.rank, self.ranks, self.window_bytes
        )
        if not self.shards_optimizer:
            return bind_plainly(self, model, optimizer, ReplicaUpdates(updates, reducer))
        runs = cut_optimizer(model, optimizer, reducer)
        stateful = ShardedOptimizer(optimizer, list(runs.values()))
        parts = {"model": Part(model), "optimizer": Part(stateful)}
        return BoundModel(model, ShardUpdates(updates, reducer, runs), parts)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002 - the seam
        """Return an empty context, because gradients are reduced after the passes of a step."""
        return nullcontext()

    def align(self, model: nn.Module) -> None:
        """Do nothing: parameters are equal, and no pass may change a buffer."""
