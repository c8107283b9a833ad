"""Events of the adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from resilient.events import Event, Level


@dataclass(frozen=True, slots=True)
class EarlyStopKept(Event):
    """A run that a callback had stopped early was started again."""

    level: ClassVar[Level] = Level.WARNING
    callback: str
    trained_steps: int

    def line(self) -> str:
        """Name the callback and the command that trains further."""
        return (
            f"{self.callback} stopped this run at step {self.trained_steps}: no step is trained; "
            "to train further, start without that callback or with more patience"
        )


@dataclass(frozen=True, slots=True)
class CheckpointPathIgnored(Event):
    """A trainer was told to load a checkpoint of its own, and the repository has a newer one."""

    level: ClassVar[Level] = Level.WARNING
    path: str
    checkpoint: str

    def line(self) -> str:
        """Name both checkpoints."""
        return f"training continues from {self.checkpoint}; `{self.path}` was only its first start"


@dataclass(frozen=True, slots=True)
class StateNotKept(Event):
    """Some state of a trainer is outside its checkpoints."""

    level: ClassVar[Level] = Level.WARNING
    names: tuple[str, ...]
    reason: str

    def line(self) -> str:
        """Name the state and the reason."""
        return f"not kept in checkpoints: {', '.join(self.names)}: {self.reason}"
