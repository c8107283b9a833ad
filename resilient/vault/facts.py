"""Events of the keeper, of parity, of tiers and of a resume."""

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
class StepLanded(Event):
    """A step that only memory held is a checkpoint now: the ranks that made it are gone."""

    checkpoint: str

    def line(self) -> str:
        """Say what was saved for whom."""
        return f"{self.checkpoint} was held in memory; its ranks ended, and it is durable now"


@dataclass(frozen=True, slots=True)
class StepLost(Event):
    """Steps that memory held could not be saved when their ranks were gone."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    reason: str

    def line(self) -> str:
        """Say why, and what counts now."""
        return (
            f"{self.checkpoint} was held in memory and is lost with its ranks: {self.reason}; "
            "the last save counts"
        )


@dataclass(frozen=True, slots=True)
class HoldingEnded(Event):
    """Steps are not held in memory, or no more: what is lost to a crash is what saves say."""

    level: ClassVar[Level] = Level.WARNING
    reason: str

    def line(self) -> str:
        """Say why."""
        return f"steps are not held in memory: {self.reason}; saves go on as they did"


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
class CountersUnread(Event):
    """Counters of a loop were given as 0 and resumed as more, and the loop did not use them.

    Attributes:
        counters: name and resumed value of each.
    """

    level: ClassVar[Level] = Level.WARNING
    counters: tuple[tuple[str, int], ...]

    def line(self) -> str:
        """Name each counter with its resumed value, and the way to use it."""
        shown = ", ".join(f"`{name}` was resumed as {value}" for name, value in self.counters)
        name = self.counters[0][0]
        return (
            f"{shown}, but the loop neither read nor set it after resume(): if the loop counts "
            f'from 0 again, continue from checkpointer["{name}"]'
        )


@dataclass(frozen=True, slots=True)
class PartsLeftOut(Event):
    """The checkpoint that was resumed holds parts that nothing here takes."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    parts: tuple[str, ...]

    def line(self) -> str:
        """Name the parts, and say what keeps them."""
        return (
            f"{self.checkpoint} holds what was not given and will not be saved again: "
            f"{', '.join(self.parts)}; `resilient ckpt tag` keeps it from being rotated away"
        )


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
class TidyingBroke(Event):
    """What follows a commit met an error that is no store's; the checkpoint stays committed."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    reason: str

    def line(self) -> str:
        """Say what broke where, and that nothing was lost by it."""
        return (
            f"{self.checkpoint} is saved, but a defect, not the store, kept old ones from being "
            f"looked through: {self.reason}; report it, and run resilient ckpt prune REPO --dry-run"
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


@dataclass(frozen=True, slots=True)
class CheckpointPromoted(Event):
    """A checkpoint of the near tier is in the durable one as well."""

    checkpoint: str
    put_bytes: int
    took_seconds: float

    def line(self) -> str:
        """Say what it cost."""
        return (
            f"{self.checkpoint} is in the durable tier too, {self.put_bytes / 2**20:.1f} MiB in "
            f"{self.took_seconds:.2f} s"
        )


@dataclass(frozen=True, slots=True)
class DurableCadenceChosen(Event):
    """How often the durable tier takes a save is chosen, or is another by more than a quarter.

    Attributes:
        interval_seconds: from one that goes on to the next.
        cost_seconds: C, what a promotion takes.
        mtbf_seconds: M, the mean time between losses of hosts.
        losses: of hosts that are on record, which M is from.
        bound: what keeps the interval from the best one; empty if nothing does.
    """

    interval_seconds: float
    cost_seconds: float
    mtbf_seconds: float
    losses: int
    bound: str

    def line(self) -> str:
        """Say the interval and why it is that."""
        why = f"a promotion takes {self.cost_seconds:.3g} s, {self.losses} changes of hosts: one in"
        why += f" {self.mtbf_seconds / 3600:.3g} h"
        if self.bound:
            why += f"; bounded ({self.bound})"
        return f"a save goes on to the durable tier every {self.interval_seconds:.3g} s: {why}"


@dataclass(frozen=True, slots=True)
class PromotionFailed(Event):
    """A checkpoint did not get to the durable tier; the near one has it, the next save retries."""

    level: ClassVar[Level] = Level.WARNING
    checkpoint: str
    reason: str

    def line(self) -> str:
        """Say where it is."""
        return (
            f"{self.checkpoint} is in the near tier alone: {self.reason}; "
            "the next save is promoted in its place"
        )


@dataclass(frozen=True, slots=True)
class NearTierFresh(Event):
    """The near tier of some ranks' host holds no life of this run, though other hosts' do."""

    level: ClassVar[Level] = Level.WARNING
    ranks: Sequence[int]

    def line(self) -> str:
        """Say what is lost with it."""
        ranks = ", ".join(str(rank) for rank in self.ranks)
        return (
            f"the near tier of ranks {ranks} is empty: that host is new or lost its disk; what "
            "needs a file that lay there alone cannot be resumed from"
        )


@dataclass(frozen=True, slots=True)
class NearCopyDoubted(Event):
    """An object of the near tier is not what was stored; it was read from the durable tier."""

    level: ClassVar[Level] = Level.WARNING
    key: str
    near: str
    durable: str

    def line(self) -> str:
        """Say what was read from where, and what mends it."""
        checkpoint = self.key.partition("/")[0]
        return (
            f"`{self.key}` in the near tier is damaged; read from the durable one instead: "
            f"resilient ckpt repair {checkpoint} --repo {self.near} --from {self.durable}"
        )
