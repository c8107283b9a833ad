"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from resilient.strategies.strategy import bind_plainly

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from resilient.strategies.strategy import Bound, Updates


class SingleStrategy:
    """Trains the model as it is."""

    name = "single"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def bind(self, model: nn.Module, optimizer: Optimizer, updates: Updates) -> Bound:
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
