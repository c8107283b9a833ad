"""Where the vault's work is done: the repository, the ranks, the bounds, the time, the listener."""

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
_RESTED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Bounds of one run at its repository.

    Attributes:
        retention: which checkpoints stay.
        within_seconds: how long one phase of a save or one candidate of a resume may take.
        single_writer: the user promises to be the only job, so a store without exclusive
            create may be used.
        save_unchanged: ``refer``: bytes that the store has already are not written again;
            ``write``: every checkpoint stands for itself.
        parity: how many files of each rank may be lost and be computed back.
        repair_on_restore: whether a restore computes damaged files back, in memory, where parity
            can, instead of going back to an older checkpoint.
        pace_seconds_max: how long a save may take to be durable because whoever persists it
            rests while training uses all cores (:mod:`resilient.checkpoint.throttle`); 0 for no rest.

    Raises:
        ConfigError: a value that is not accepted.
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
                f"{type(self.retention).__name__}, and no Retention"
            )
        if self.save_unchanged not in UNCHANGED:
            raise ConfigError(
                f"`save_unchanged`={self.save_unchanged!r} is not accepted: "
                f"use one of {', '.join(UNCHANGED)}"
            )
        if not self.within_seconds > 0:
            raise ConfigError(
                f"`within_seconds`={self.within_seconds!r} is not accepted: use the seconds that "
                "one phase of a save may take, more than 0"
            )
        if not self.pace_seconds_max >= 0:
            raise ConfigError(
                f"`pace_seconds_max`={self.pace_seconds_max!r} is not accepted: "
                "use 0 for saves that never rest, or seconds"
            )

    @property
    def rested_seconds_max(self) -> float:
        """How long a save may rest: other ranks wait for its receipt, and not beyond a deadline."""
        return min(self.pace_seconds_max, self.within_seconds * _RESTED_SHARE)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CheckpointOptions:
        """Return the limits that ``to_json`` described."""
        return CheckpointOptions(**{**value, "retention": Retention.from_json(value["retention"])})


@dataclass(frozen=True, slots=True)
class PostCommitPlan:
    """What every place does after a commit, as the coordinator rules.

    Attributes:
        due: what goes on to the durable tier, oldest first.
        staying: what may not leave the near tiers, because it is on its way or still owed.
        keep: what the run protects, so that no run ends well before it is durable.
    """

    due: tuple[CheckpointId, ...] = ()
    staying: tuple[CheckpointId, ...] = ()
    keep: tuple[CheckpointId, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {
            "due": [one.folder for one in self.due],
            "staying": [one.folder for one in self.staying],
            "keep": [one.folder for one in self.keep],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PostCommitPlan:
        """Return what ``to_json`` described."""
        found = {name: map(parse_checkpoint, value[name]) for name in ("due", "staying", "keep")}
        return PostCommitPlan(
            **{name: tuple(one for one in some if one) for name, some in found.items()}
        )


class Promoter(Protocol):
    """Brings what a near tier took to the durable one; asked by the leader of each place."""

    def begin(self, desk: CheckpointContext, mine: int, parent: CheckpointId | None) -> None:
        """Note which life this is, and what it began from."""

    def plan(
        self, desk: CheckpointContext, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> PostCommitPlan:
        """Return what follows now that ``checkpoint`` is committed; asked of the coordinator."""

    def committed(
        self, desk: CheckpointContext, checkpoint: CheckpointId, orders: PostCommitPlan
    ) -> None:
        """Start to promote what is due, and rotate the near tier of this place."""

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Take a checkpoint for the newest that somebody else has committed and seen to."""

    def finish(self, desk: CheckpointContext, within_seconds: float) -> None:
        """Return when what was committed last is durable, and what the run protects."""

    def close(self) -> None:
        """Let go of threads."""


@dataclass(frozen=True, slots=True)
class CheckpointContext:
    """What every collective act of the vault needs.

    Attributes:
        store: the repository.
        comms: the ranks; used by one thread at a time.
        limits: the bounds.
        clock: time.
        emit: where events go.
        signing: whether what is committed is signed, and what is read must be.
        promoter: brings what the store's near tier took to the durable one; None without tiers.
        places: which ranks share a near tier.
        token: token of the claim that this process writes for; empty before the claim.
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
    def leads(self) -> bool:
        """Whether this rank cares for the near repository of its host, if each has its own."""
        return self.places.leads(self.world.rank)

    @property
    def world(self) -> World:
        """Who this rank is."""
        return self.comms.world

    def tell(self, event: Event) -> None:
        """Emit a fact of the whole gang once, from the coordinator."""
        if self.world.is_coordinator:
            self.emit(event)

    def tell_mended(self, proved: VerifiedCheckpoint) -> None:
        """Say what this rank found damaged; another rank may have read other files."""
        if proved.mended:
            self.emit(CheckpointReconstructed(proved.manifest.checkpoint.folder, proved.mended))

    def within(self, life: Generation) -> CheckpointContext:
        """Return a desk that writes for this generation and names it in its events."""
        emit = self.emit.bind(run=life.run_id, generation=life.number)
        return replace(self, emit=emit, token=life.token)

    def wants(
        self,
        parts: Collection[str],
        boxes: Callable[[Manifest], Boxes],
        places: Callable[[Manifest], PlacesByFile] | None = None,
    ) -> ReadRequest:
        """Return what to read of a checkpoint, under the bounds of this run."""
        return ReadRequest(parts, boxes, self.signing, self.limits.repair_on_restore, places)

    def finish(self, *, is_closing: bool = False) -> None:
        """Return when what was saved last is in the durable tier, if there are tiers.

        Collective with a near tier for each host.
        Crash: the near tier has it.

        Args:
            is_closing: the other hosts may never come, for this may be the way out after an
                error; they are not waited for as long as for a slow store.

        Raises:
            SaveFailed: the near tier alone has it.
            Fenced: a newer life began.
        """
        within_seconds = self.limits.within_seconds
        if is_closing:
            within_seconds = min(within_seconds, _CLOSE_SECONDS)
        if self.promoter and self.leads:
            self.promoter.finish(self, within_seconds)

    def close(self) -> None:
        """Let go of threads and connections.

        Crash: nothing changes.
        """
        if self.promoter:
            self.promoter.close()
        if isinstance(self.store, TieredStore):
            self.store.close()
