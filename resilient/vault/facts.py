"""Events of the keeper, of parity and of a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Sequence


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


@dataclass(frozen=True, slots=True)
class CopyFailed(Event):
    """The second copy of a manifest could not be put; the checkpoint is committed all the same."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    reason: str

    def line(self) -> str:
        """Say what is missing, and what puts it there."""
        return (
            f"{self.checkpoint} is saved, but its manifest has no second copy: {self.reason}; "
            f"resilient ckpt repair {self.checkpoint}"
        )


@dataclass(frozen=True, slots=True)
class CheckpointMended(Event):
    """A rank resumed from a damaged checkpoint: parity gave back what was lost, in memory."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    files: Sequence[str]

    def line(self) -> str:
        """Say what is still damaged in the store, and what mends it there."""
        return (
            f"computed back from parity and proved: {', '.join(self.files)}; the store still "
            f"holds the damage: resilient ckpt repair {self.checkpoint}"
        )
