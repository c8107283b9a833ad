"""Events of the checkpoint engine: saver daemon, parity files, storage tiers and resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class DaemonBypassed(Event):
    """The trainers persisted a save themselves, because a rank had no saver daemon."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{checkpoint} is persisted by the trainers, because no saver daemon is available: "
        "{reason}. If the trainers end first, the checkpoint is lost"
    )
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class CachedStepCommitted(Event):
    """The daemon committed a cached step after the ranks that made it had ended."""

    template: ClassVar[str] = (
        "{checkpoint} was cached in memory; its ranks ended, and the checkpoint is durable now"
    )
    checkpoint: str


@dataclass(frozen=True, slots=True)
class CachedStepLost(Event):
    """Cached steps could not be committed after their ranks had ended."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{checkpoint} was cached in memory and is lost with its ranks: {reason}; the last save is "
        "the newest checkpoint"
    )
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepCacheDisabled(Event):
    """Steps are no longer cached, or never were; a crash loses all steps since the last save."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "steps are not cached in memory: {reason}; saves continue as before"
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryCopyRejected(Event):
    """A file in the daemon's memory differs from the stored file, so the stored file was read."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "`{key}` in memory differs from what was saved; read from the store instead"
    )
    key: str


@dataclass(frozen=True, slots=True)
class PartsMissing(Event):
    """The checkpoint lacks some parts; these parts keep their fresh state."""

    level: ClassVar[Level] = Level.WARNING
    parts: tuple[str, ...]

    def message(self) -> str:
        """Render the event as one line for people."""
        return f"not in the checkpoint, started from their initial state: {', '.join(self.parts)}"


@dataclass(frozen=True, slots=True)
class CountersUnread(Event):
    """The training loop ignored the resumed values of counters that it had given as 0.

    Attributes:
        counters: Resumed value of each counter, by name.
    """

    level: ClassVar[Level] = Level.WARNING
    counters: tuple[tuple[str, int], ...]

    def message(self) -> str:
        """Name each counter with its resumed value, and the way to use it."""
        text = ", ".join(f"`{name}` was resumed as {value}" for name, value in self.counters)
        name = self.counters[0][0]
        return (
            f"{text}, but the loop neither read nor set it after resume(): if the loop counts "
            f'from 0 again, continue from checkpointer["{name}"]'
        )


@dataclass(frozen=True, slots=True)
class PartsIgnored(Event):
    """Parts of the resumed checkpoint that no live object loads."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    parts: tuple[str, ...]

    def message(self) -> str:
        """Render the event as one line for people."""
        return (
            f"{self.checkpoint} holds parts that this run does not have and will not save: "
            f"{', '.join(self.parts)}; `resilient ckpt tag` protects the checkpoint from deletion"
        )


@dataclass(frozen=True, slots=True)
class ManifestCopyFailed(Event):
    """The second copy of a manifest could not be stored; the checkpoint is committed anyway."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{checkpoint} is saved, but its manifest has no second copy: {reason}; resilient ckpt "
        "repair {checkpoint}"
    )
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class PostCommitCleanupFailed(Event):
    """An error other than a store error followed a commit; the checkpoint stays committed."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{checkpoint} is saved, but garbage collection failed on a defect of this library, not of "
        "the store: {reason}; report the defect, and run resilient ckpt prune REPO --dry-run"
    )
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointReconstructed(Event):
    """A rank resumed from a damaged checkpoint: parity restored the lost bytes in memory."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    files: Sequence[str]

    def message(self) -> str:
        """Render the event as one line for people."""
        return (
            f"reconstructed from parity and verified: {', '.join(self.files)}; the store still "
            f"holds the damage: resilient ckpt repair {self.checkpoint}"
        )


@dataclass(frozen=True, slots=True)
class CheckpointPromoted(Event):
    """A checkpoint of the near tier is now in the durable tier as well."""

    checkpoint: str
    put_bytes: int
    took_seconds: float

    def message(self) -> str:
        """Render the event as one line for people."""
        return (
            f"{self.checkpoint} is in the durable tier too, {self.put_bytes / 2**20:.1f} MiB in "
            f"{self.took_seconds:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class PromotionScheduleChosen(Event):
    """The promotion interval was chosen, or changed by more than a quarter.

    Attributes:
        interval_seconds: Seconds from one promoted save to the next.
        cost_seconds: C, duration of a promotion.
        mtbf_seconds: M, mean time between losses of hosts.
        losses: Number of recorded host losses, from which M is computed.
        bound: Bound that limits the interval, if it differs from the optimum; empty for none.
    """

    interval_seconds: float
    cost_seconds: float
    mtbf_seconds: float
    losses: int
    bound: str

    def message(self) -> str:
        """Render the event as one line for people."""
        reason = (
            f"a promotion takes {self.cost_seconds:.3g} s, {self.losses} changes of hosts: one in"
        )
        reason += f" {self.mtbf_seconds / 3600:.3g} h"
        if self.bound:
            reason += f"; limited ({self.bound})"
        return (
            f"a save is promoted to the durable tier every {self.interval_seconds:.3g} s: {reason}"
        )


@dataclass(frozen=True, slots=True)
class PromotionFailed(Event):
    """A promotion failed; the near tier has the checkpoint and the next save retries."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "{checkpoint} is only in the near tier: {reason}; the next save is promoted instead"
    )
    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class NearTierEmpty(Event):
    """The near tier of a host has no generation of this run, but near tiers of other hosts do."""

    level: ClassVar[Level] = Level.WARNING
    ranks: Sequence[int]

    def message(self) -> str:
        """Render the event as one line for people."""
        ranks = ", ".join(str(rank) for rank in self.ranks)
        return (
            f"the near tier of ranks {ranks} is empty: the host is new or lost its disk; "
            "checkpoints with a file only in that tier cannot be resumed"
        )


@dataclass(frozen=True, slots=True)
class NearCopyRejected(Event):
    """An object of the near tier is damaged; the reader used the durable tier."""

    level: ClassVar[Level] = Level.WARNING
    key: str
    near: str
    durable: str

    def message(self) -> str:
        """Render the event as one line for people."""
        checkpoint = self.key.partition("/")[0]
        return (
            f"`{self.key}` in the near tier is damaged; read from the durable one instead: "
            f"resilient ckpt repair {checkpoint} --repo {self.near} --from {self.durable}"
        )


@dataclass(frozen=True, slots=True)
class HeartbeatFailed(Event):
    """The process that writes could not store its heartbeat; emitted once."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "cannot store the heartbeat of this run: {reason}. Training continues; a start by hand on "
        "another host may take the repository over"
    )
    reason: str


@dataclass(frozen=True, slots=True)
class WriterAwaited(Event):
    """A manual start waits for a heartbeat of the last writer, which ran on another host."""

    template: ClassVar[str] = (
        "process {pid} on {host} wrote to this repository last; waiting up to {seconds:.0f} s for "
        "its next heartbeat"
    )
    pid: int
    host: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WriterSilent(Event):
    """The last writer sent no heartbeat, so a manual start takes over the repository."""

    template: ClassVar[str] = (
        "process {pid} on {host} sent no heartbeat for {seconds:.0f} s; this start takes over"
    )
    pid: int
    host: str
    seconds: float
