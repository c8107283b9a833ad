"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


class SingleStrategy:
    """Trains the model as it is."""

    name = "single"

    def prepare(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model itself."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:  # noqa: ARG002 - the seam
        """Return an empty context."""
        return nullcontext()

    def align(self, model: nn.Module) -> None:
        """Do nothing: there is one replica."""
