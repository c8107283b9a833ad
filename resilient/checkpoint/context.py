"""Context of a checkpoint operation: store, ranks, options, clock, events and promoter.

A promoter copies checkpoints from a fast local store (near tier) to the durable store.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from resilient.checkpoint.events import CheckpointReconstructed
from resilient.checkpoint.restore.read import ReadRequest
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.tiers.peer_store import NearTierGroups
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.errors import ConfigError
from resilient.format.keys import parse_checkpoint
from resilient.format.parity import check_parity
from resilient.format.signature import SigningPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from resilient.checkpoint.generations import Generation
    from resilient.checkpoint.restore.read import VerifiedCheckpoint
    from resilient.clock import Clock
    from resilient.distributed.coordination import ControlGroup
    from resilient.distributed.launch_env import World
    from resilient.events import Emitter, Event
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import Manifest
    from resilient.format.partial_read import Boxes, PlacesByFile
    from resilient.storage.store import Store

UNCHANGED = ("refer", "write")
_CLOSE_SECONDS = 10.0
_PAUSE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of one run at its repository.

    Attributes:
        retention: Policy that decides which checkpoints stay.
        within_seconds: Deadline for one phase of a save or one candidate of a resume.
        single_writer: Promise of the user to run the only job, so a store without exclusive
            create may be used.
        save_unchanged: ``refer`` does not write bytes again that the store already has.
            ``write`` makes every checkpoint self-contained.
        parity: Number of files per rank that may be lost and are reconstructed.
        repair_on_restore: Whether a restore reconstructs damaged files in memory from parity,
            instead of using an older checkpoint.
        pace_seconds_max: Longest delay of a save by its pauses while training uses all cores
            (:mod:`resilient.checkpoint.throttle`); 0 for no pauses.

    Raises:
        ConfigError: A value is not accepted.
    """

    retention: Retention = field(default_factory=Retention)
    within_seconds: float = 600.0
    single_writer: bool = False
    save_unchanged: str = "refer"
    parity: int = 0
    repair_on_restore: bool = True
    pace_seconds_max: float = 60.0

    def __post_init__(self) -> None:
        check_parity(self.parity)
        if not isinstance(self.retention, Retention):
            raise ConfigError(
                f"`retention`={self.retention!r} is not accepted: it is a "
                f"{type(self.retention).__name__}, not a Retention"
            )
        if self.save_unchanged not in UNCHANGED:
            raise ConfigError(
                f"`save_unchanged`={self.save_unchanged!r} is not accepted: "
                f"use one of {', '.join(UNCHANGED)}"
            )
        if not self.within_seconds > 0:
            raise ConfigError(
                f"`within_seconds`={self.within_seconds!r} is not accepted: use a number of "
                "seconds above 0, the limit of one phase of a save"
            )
        if not self.pace_seconds_max >= 0:
            raise ConfigError(
                f"`pace_seconds_max`={self.pace_seconds_max!r} is not accepted: use a number of "
                "seconds, or 0 for saves without pauses"
            )

    @property
    def pause_seconds_max(self) -> float:
        """Longest total pause of a save, below the deadline with which other ranks wait."""
        return min(self.pace_seconds_max, self.within_seconds * _PAUSE_SHARE)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CheckpointOptions:
        """Return the options that ``to_json`` described."""
        return CheckpointOptions(**{**value, "retention": Retention.from_json(value["retention"])})


@dataclass(frozen=True, slots=True)
class PostCommitPlan:
    """Actions of every group that shares a near tier after a commit, as the coordinator decided.

    Attributes:
        due: Checkpoints to promote to the durable tier, oldest first.
        staying: Checkpoints that must stay in the near tiers, because their promotion is pending.
        keep: Checkpoints that the run protects. They must be durable before the run ends
            successfully.
    """

    due: tuple[CheckpointId, ...] = ()
    staying: tuple[CheckpointId, ...] = ()
    keep: tuple[CheckpointId, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {
            "due": [checkpoint.folder for checkpoint in self.due],
            "staying": [checkpoint.folder for checkpoint in self.staying],
            "keep": [checkpoint.folder for checkpoint in self.keep],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PostCommitPlan:
        """Return the plan that ``to_json`` described."""
        ids_by_field = {
            name: map(parse_checkpoint, value[name]) for name in ("due", "staying", "keep")
        }
        return PostCommitPlan(
            **{
                name: tuple(checkpoint for checkpoint in entries if checkpoint)
                for name, entries in ids_by_field.items()
            }
        )


class Promoter(Protocol):
    """Promotion from near tiers to the durable tier, by the leader of each near tier."""

    def begin(
        self, context: CheckpointContext, generation: int, parent: CheckpointId | None
    ) -> None:
        """Record the generation of this attempt, and the checkpoint that it began from."""

    def plan(
        self, context: CheckpointContext, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> PostCommitPlan:
        """Return the actions after the commit of ``checkpoint``; for the coordinator only."""

    def committed(
        self, context: CheckpointContext, checkpoint: CheckpointId, post_commit_plan: PostCommitPlan
    ) -> None:
        """Start to promote due checkpoints, and collect garbage in the near tier of this place."""

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Record as newest a checkpoint that another process has committed and handled."""

    def finish(self, context: CheckpointContext, within_seconds: float) -> None:
        """Wait until the last commit and all checkpoints that the run protects are durable."""

    def close(self) -> None:
        """Release threads."""


@dataclass(frozen=True, slots=True)
class CheckpointContext:
    """Context of every collective checkpoint operation.

    Attributes:
        store: Repository.
        comms: Control group of the ranks; used by one thread at a time.
        limits: Options.
        clock: Time source.
        emit: Emitter of events.
        signing: Whether commits are signed, and whether reads require a signature.
        promoter: Promoter from the near tier to the durable tier; None without tiers.
        places: Groups of ranks that share a near tier.
        token: Token of the claim under which this process writes; empty before the claim.
    """

    store: Store
    comms: ControlGroup
    limits: CheckpointOptions
    clock: Clock
    emit: Emitter
    signing: SigningPolicy = field(default_factory=SigningPolicy)
    promoter: Promoter | None = None
    places: NearTierGroups = field(default_factory=NearTierGroups)
    token: str = ""

    @property
    def is_near_tier_leader(self) -> bool:
        """True if this rank manages the near repository of its host, if each host has its own."""
        if not self.places.groups:
            return self.world.is_coordinator
        return self.places.is_leader(self.world.rank)

    @property
    def world(self) -> World:
        """Rank and number of ranks."""
        return self.comms.world

    def emit_once(self, event: Event) -> None:
        """Emit an event of the whole rank group once, from the coordinator."""
        if self.world.is_coordinator:
            self.emit(event)

    def report_reconstructed(self, verified: VerifiedCheckpoint) -> None:
        """Report the files that this rank found damaged; other ranks may have read other files."""
        if verified.reconstructed:
            self.emit(
                CheckpointReconstructed(verified.manifest.checkpoint.folder, verified.reconstructed)
            )

    def for_generation(self, generation: Generation) -> CheckpointContext:
        """Return a context that writes for this generation and adds its number to all events."""
        emit = self.emit.bind(run=generation.run_id, generation=generation.number)
        return replace(self, emit=emit, token=generation.token)

    def read_request(
        self,
        parts: Collection[str],
        boxes: Callable[[Manifest], Boxes],
        places: Callable[[Manifest], PlacesByFile] | None = None,
    ) -> ReadRequest:
        """Return the request to read a checkpoint, with the options of this run."""
        return ReadRequest(parts, boxes, self.signing, self.limits.repair_on_restore, places)

    def finish(self, *, is_closing: bool = False) -> None:
        """Wait until the last save is in the durable tier, if there are tiers.

        Collective: with a near tier per host.
        Crash: the near tier has the save.

        Args:
            is_closing: Whether the run is closing, perhaps after an error. Other hosts may never
                arrive then, so the wait is at most 10 s.

        Raises:
            SaveFailed: Only the near tier has the save.
            Fenced: A newer generation exists.
        """
        within_seconds = self.limits.within_seconds
        if is_closing:
            within_seconds = min(within_seconds, _CLOSE_SECONDS)
        if self.promoter and self.is_near_tier_leader:
            self.promoter.finish(self, within_seconds)

    def close(self) -> None:
        """Release threads and connections.

        Crash: nothing changes.
        """
        if self.promoter:
            self.promoter.close()
        if isinstance(self.store, TieredStore):
            self.store.close()
