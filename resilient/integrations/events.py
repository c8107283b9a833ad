"""Events of the integrations with other trainers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from resilient.events import Event, Level
from resilient.redaction import shell_quote


@dataclass(frozen=True, slots=True)
class AdapterAdded(Event):
    """A trainer of another library saves to a repository, because the launcher requested it."""

    template: ClassVar[str] = (
        "adapter {adapter}: the trainer saves to `{repository}` and resumes from there"
    )
    adapter: str
    repository: str


@dataclass(frozen=True, slots=True)
class EarlyStopKept(Event):
    """A run that a callback had stopped early was started again."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{callback} stopped this run at step {trained_steps}: no step is trained; to continue "
        "training, start without that callback or with more patience"
    )
    callback: str
    trained_steps: int


@dataclass(frozen=True, slots=True)
class CheckpointPathIgnored(Event):
    """A trainer got a checkpoint in its own format, but the repository has a newer checkpoint."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "training continues from {checkpoint}; `{path}` was only used for the first start"
    )
    path: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class CheckpointLossReported(Event):
    """A run started from a checkpoint of its trainer that had lost a part."""

    level: ClassVar[Level] = Level.WARNING
    path: str
    lost: tuple[str, ...]

    def message(self) -> str:
        """Name the losses and the command for details."""
        return (
            f"training continues from `{self.path}` with loss of {'; '.join(self.lost)}; "
            "--strict-resume refuses that; "
            f"resilient ckpt verify {shell_quote(self.path)} says more"
        )


@dataclass(frozen=True, slots=True)
class StateNotKept(Event):
    """Some state of a trainer is not saved in checkpoints."""

    level: ClassVar[Level] = Level.WARNING
    names: tuple[str, ...]
    reason: str

    def message(self) -> str:
        """Name the state and the reason."""
        return f"not kept in checkpoints: {', '.join(self.names)}: {self.reason}"
