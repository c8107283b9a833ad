"""The seam for how a model is parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn


class Strategy(Protocol):
    """How a model is spread over ranks."""

    @property
    def name(self) -> str:
        """What a checkpoint says of it."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return ``model``, already on its device, wrapped for training. Collective."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's model inside what ``prepare`` returned."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients of this rank alone."""

    def align(self, model: nn.Module) -> None:
        """Make what is replicated equal on all ranks, before it is saved or evaluated.

        Collective.
        """
