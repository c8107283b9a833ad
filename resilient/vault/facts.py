"""Events of the keeper and of a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from resilient.events import Event, Level


@dataclass(frozen=True, slots=True)
class KeeperBypassed(Event):
    """A save was persisted by the trainers themselves, because a rank has no keeper for it."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    reason: str

    def line(self) -> str:
        """Say what that means for a crash."""
        return (
            f"{self.checkpoint} is persisted by the trainers and would be lost with them, "
            f"because a keeper is missing: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class MemoryDoubted(Event):
    """A file in the keeper's memory is not what was stored; it was read from the store."""

    level: ClassVar[Level] = Level.WARNING
    key: str

    def line(self) -> str:
        """Say what was read from where."""
        return f"`{self.key}` in memory is not what was saved; read from the store instead"


@dataclass(frozen=True, slots=True)
class PartsStartedFresh(Event):
    """The checkpoint does not hold these parts."""

    level: ClassVar[Level] = Level.WARNING
    parts: tuple[str, ...]

    def line(self) -> str:
        """Name the parts."""
        return f"not in the checkpoint, started fresh: {', '.join(self.parts)}"
