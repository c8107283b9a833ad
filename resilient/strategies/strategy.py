"""The seam for how a model is parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from resilient.state.capture import Part
from resilient.state.optimizer import NamedOptimizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import nn
    from torch.optim import Optimizer


class Updates(Protocol):
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
class Bound:
    """A model and its optimizer, ready to be trained.

    Attributes:
        model: forward passes of training go through it.
        updates: makes the steps.
        parts: ``model`` and ``optimizer``, as they are saved and loaded.
    """

    model: nn.Module
    updates: Updates
    parts: dict[str, Part]


def bind_plainly(
    strategy: Strategy, model: nn.Module, optimizer: Optimizer, updates: Updates
) -> Bound:
    """Return a model whose parameters are the optimizer's own."""
    plain = strategy.unwrap(model)
    parts = {"model": Part(plain), "optimizer": Part(NamedOptimizer(plain, optimizer))}
    return Bound(model, updates, parts)


class Strategy(Protocol):
    """How a model is spread over ranks."""

    @property
    def name(self) -> str:
        """What a checkpoint says of it."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return ``model``, already on its device, wrapped for training. Collective."""

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: Updates) -> Bound:
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
