"""What the user may ask of the agent and of the workers; values without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from resilient.agent.health.heartbeat import HangRule
from resilient.agent.verdict.history import Limits
from resilient.world.identity import StartIdentity

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the agent waits for what.

    Attributes:
        interval_seconds: between two questions whether nodes want to join.
        grace_seconds: from SIGTERM to SIGKILL when the workers have something to save.
        survivor_seconds: the same after a failure, when it is saved or lost already; a save
            that a survivor persists by itself may land in that time.
        kept_survivor_seconds: the same when a keeper persists what is staged.
        barrier_seconds: how long finished nodes wait for the others.
        hang: how long workers may show no progress.
        limits: how often they may fail.
    """

    interval_seconds: float = 0.1
    grace_seconds: float = 25.0
    survivor_seconds: float = 2.0
    kept_survivor_seconds: float = 0.2
    barrier_seconds: float = 300.0
    hang: HangRule = field(default_factory=HangRule)
    limits: Limits = field(default_factory=Limits)

    def beside(self, *, has_keeper: bool) -> Patience:
        """Return the patience with survivors: what a keeper has needs no time of theirs."""
        seconds = self.kept_survivor_seconds if has_keeper else self.survivor_seconds
        return replace(self, survivor_seconds=seconds)


@dataclass(frozen=True, slots=True)
class KeeperWishes:
    """How the keeper of staged checkpoints is started.

    Attributes:
        host_bytes_max: memory of this host for staged bytes; 0 leaves it to the machine,
            negative means no keeper.
        listen: address for the keepers of other hosts; empty for all interfaces.
        ranks: of this host, which share that memory.
        is_auto: whether the bound is the machine's and not the user's.
        why_not: why there is no keeper though one was wanted.
    """

    host_bytes_max: int = -1
    listen: str = "127.0.0.1"
    ranks: int = 1
    is_auto: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What every worker is told; see :class:`resilient.world.launch.Launch`.

    The agent removes the folder ``notes`` when it leaves; empty lets it make one. Unless
    ``is_warm``, it starts each worker from nothing. In the folder ``log_dir`` it keeps what they
    print. ``resume`` holds in every attempt: the workers read the repository and decide.
    """

    repo: str = ""
    resume: str = "auto"
    events: str = ""
    single_writer: bool = False
    keeper: KeeperWishes = field(default_factory=KeeperWishes)
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: str = ""
    require_signature: bool = False
    strict_resume: bool = False
    is_warm: bool = True
    every: str = ""
    until_step: int = 0
    log_dir: str = ""
    start: StartIdentity = field(default_factory=StartIdentity)
