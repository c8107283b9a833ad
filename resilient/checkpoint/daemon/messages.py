"""Messages between a rank and the saver daemon: identity of the rank, save jobs, storage tiers.

The saver daemon is a process per host that writes checkpoints in the background. A save job is a
JSON message. The bytes to save stay in shared memory. With a near tier (fast local store), a
message also names the ranks that share a near tier, and the near tiers of other hosts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.context import CheckpointOptions
from resilient.checkpoint.daemon.connection import FileStream, RemoteFile, StreamBuffer, no_deadline
from resilient.checkpoint.promotion import TierPromoter, add_near_tier
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save.dedup import DedupBase
from resilient.checkpoint.save.persist import SaveJob
from resilient.checkpoint.tiers.peer_store import NearTierGroups, PeerStore
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.distributed.coordination import RankFailure
from resilient.distributed.kv_store import Address
from resilient.distributed.launch_env import World
from resilient.errors import ResilientError, UsageError
from resilient.format.keys import CheckpointId, is_file_name, parse_checkpoint, segment_key
from resilient.format.ledger import decode_segment, encode_segment
from resilient.format.manifest import Receipt, TensorEntry, decode, encode
from resilient.format.safetensors_file import StagedFile
from resilient.format.signature import SigningKey, SigningPolicy
from resilient.storage.open import local_path, open_store
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.clock import Clock
    from resilient.format.ledger import Segment
    from resilient.storage.store import Store

PROTOCOL_VERSION = 8


@dataclass(frozen=True, slots=True)
class DaemonAddress:
    """Address of this host's saver daemon, and facts about the rank for the daemon.

    Attributes:
        path: Path of its socket.
        host: Name by which other hosts reach this host. The host of rank 0 has the key-value store.
        url: Repository, for the daemon to open.
        near_url: Near repository; empty for none.
        tiering: Options of the near repository.
        events: File to which the daemon appends its events; empty for none.
        storage_options: Access to the repository. They are sent over a socket that only this user
            may open, and are never shown.
        left_seconds: Callback for the seconds until this rank's process must end. The rank waits
            for a silent daemon only for a share of this time.
    """

    path: str
    host: str = ""
    url: str = ""
    near_url: str = ""
    tiering: TieringOptions | None = None
    events: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    left_seconds: Callable[[], float] = field(default=no_deadline, repr=False)


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Identity and options of a rank, from its hello message."""

    url: str
    store: Store
    near: Store | None
    tiering: TieringOptions
    world: World
    scope: str
    limits: CheckpointOptions
    events: str
    signing: SigningPolicy


def hello_message(address: DaemonAddress, context: CheckpointContext) -> dict[str, Any]:
    """Return the hello message of a rank.

    Crash: nothing changes.
    """
    world = context.world
    return {
        "version": PROTOCOL_VERSION,
        "url": absolute_url(address.url),
        "near_url": absolute_url(address.near_url) if address.near_url else "",
        "tiering": address.tiering.to_json() if address.tiering else {},
        "world": [world.rank, world.size, world.local_rank],
        "scope": context.comms.scope,
        "limits": context.limits.to_json(),
        "events": address.events,
        "storage_options": dict(address.storage_options),
        "signing_key": context.signing.key.secret.hex() if context.signing.key else "",
    }


def absolute_url(url: str) -> str:
    """Return the URL in a form that does not depend on the working folder."""
    return str(local_path(url).absolute()) if protocol_of(url) == "file" else url


def parse_hello(request: Mapping[str, Any]) -> SessionInfo:
    """Parse a hello message.

    Crash: nothing was stored.

    Raises:
        UsageError: The rank speaks another protocol version.
        ConfigError: A repository cannot be opened.
    """
    if request["version"] != PROTOCOL_VERSION:
        raise UsageError(
            f"protocol version {request['version']}, and this saver daemon has {PROTOCOL_VERSION}"
        )
    rank, size, local_rank = (int(number) for number in request["world"])
    near_url = str(request["near_url"])
    return SessionInfo(
        url=str(request["url"]),
        store=open_store(str(request["url"]), storage_options=request["storage_options"]),
        near=open_store(near_url) if near_url else None,
        tiering=TieringOptions(**request["tiering"]),
        world=World(rank, size, local_rank),
        scope=str(request["scope"]),
        limits=CheckpointOptions.from_json(request["limits"]),
        events=str(request["events"]),
        signing=_signing(str(request.get("signing_key", ""))),
    )


def _signing(secret: str) -> SigningPolicy:
    """Return the rank's signing policy; its key came over a socket that only this user may open."""
    return SigningPolicy(SigningKey(bytes.fromhex(secret))) if secret else SigningPolicy()


def tiers_to_json(context: CheckpointContext) -> dict[str, Any]:
    """Return the near-tier groups of this attempt's ranks for the daemon.

    Crash: nothing changes.
    """
    peers = context.store.peers if isinstance(context.store, TieredStore) else ()
    peer_stores = [peer for peer in peers if isinstance(peer, PeerStore)]
    return {
        "groups": context.places.groups,
        "peers": [[peer.url, peer.address.to_json()] for peer in peer_stores],
    }


class SessionTiers:
    """Near and durable tier of one rank during a save.

    Args:
        info: Rank with a near tier.
        near: Near tier.
    """

    def __init__(self, info: SessionInfo, near: Store) -> None:
        self._info = info
        self._near = near
        self._context: CheckpointContext | None = None

    @property
    def is_busy(self) -> bool:
        """True if a promotion is in progress."""
        promoter = self._context.promoter if self._context else None
        return isinstance(promoter, TierPromoter) and promoter.is_busy

    def context_for(
        self,
        context: CheckpointContext,
        request: Mapping[str, Any],
        generation: int,
        parent: CheckpointId | None,
    ) -> CheckpointContext:
        """Return a context that saves near and promotes.

        Crash: nothing was stored.

        Args:
            context: Context at the durable repository.
            request: Result of ``tiers_to_json``.
            generation: Generation number.
            parent: Checkpoint from which the generation began.
        """
        own_context = self._context
        if own_context is not None:
            self._context = replace(own_context, emit=context.emit)
            return self._context
        tiered = add_near_tier(context, self._near, self._info.tiering)
        groups = tuple(tuple(int(rank) for rank in group) for group in request["groups"])
        tiered = replace(tiered, places=NearTierGroups(groups))
        assert isinstance(tiered.store, TieredStore)  # noqa: S101 - it was just made
        tiered.store.peers = tuple(_peers(tiered.store, request["peers"], context.clock))
        if tiered.promoter and tiered.is_near_tier_leader:
            tiered.promoter.begin(tiered, generation, parent)
        self._context = tiered
        return tiered

    def finish(self, within_seconds: float) -> None:
        """Promote the last commit to the durable tier.

        Crash: the near tier has the commit.

        Raises:
            Fenced: A newer generation exists.
            SaveFailed: Only the near tier has the commit.
        """
        context = self._context
        if context and context.promoter and context.is_near_tier_leader:
            context.promoter.finish(context, within_seconds)

    def close(self) -> None:
        """Wait for a promotion in progress, then release resources.

        Crash: either tier is consistent.
        """
        if self._context is not None:
            self._context.close()


def _peers(tiers: TieredStore, peers: list[Any], clock: Clock) -> Iterator[PeerStore]:
    """Yield the near tiers of other hosts; one that does not answer now may do so later."""
    for url, address in peers:
        peer = PeerStore(Address.from_json(address), str(url), clock)
        tiers.on_close(peer.close)
        yield peer


PARSE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ResilientError)
"""Errors of parsing a message that no rank of this library has written."""


def encode_job(job: SaveJob, rank: int, slots: Iterable[str] = ()) -> dict[str, Any]:
    """Return a JSON-able value of everything in ``job`` but its bytes.

    The names of files and slots identify shared files that both sides know by these names.

    Args:
        job: Job to hand over.
        rank: Rank that hands it over.
        slots: Names of the slots for its streamed files.
    """
    tensors = tuple(tensor for file in job.content for tensor in file.tensors)
    description = job.about.checkpoint
    return {
        "checkpoint": description.folder,
        "about": encode(job.about).decode(),
        "files": [[file.name, file.size_bytes] for file in job.files],
        "streamed": [[file.name, file.size_bytes] for file in job.streamed],
        "slots": list(slots),
        "receipt": Receipt(rank, (), tensors, job.parts).to_json(),
        "keep": [checkpoint.folder for checkpoint in job.keep],
        "is_first": job.is_first,
        "topic": job.topic,
        "began_seconds": job.began_seconds,
        "stall_seconds": job.stall_seconds(),
        "bases": [base.to_json() for base in job.bases],
        "copies_bytes_max": job.copies_bytes_max,
        "segment": encode_segment(job.segment).decode() if job.segment else None,
        "token": job.token,
        "spoiled": job.copy_failure.to_json()["failure"] if job.copy_failure else None,
    }


def decode_job(
    value: Mapping[str, Any],
    memory_of: Callable[[str, int], memoryview],
    rank: int,
    within_seconds: float,
) -> tuple[SaveJob, FileStream]:
    """Return the job that ``encode_job`` described, and the stream of its streamed files.

    Args:
        value: Untrusted value from the socket.
        memory_of: Function from name and length to the shared memory of a file or slot; raises for
            an unknown name.
        rank: Rank that hands the job over.
        within_seconds: Deadline for a streamed file to arrive.

    Raises:
        UsageError: The value is not a job.
    """
    try:
        return _job(value, memory_of, rank, within_seconds)
    except PARSE_ERRORS as error:
        raise UsageError(f"invalid save job: {type(error).__name__}: {error}") from error


def _job(
    value: Mapping[str, Any],
    memory_of: Callable[[str, int], memoryview],
    rank: int,
    within_seconds: float,
) -> tuple[SaveJob, FileStream]:
    checkpoint = _checkpoint(value["checkpoint"])
    receipt = Receipt.from_json(value["receipt"])
    _require(receipt.rank == rank, f"rank {receipt.rank} on the connection of rank {rank}")
    staged_sizes, streamed_sizes = _sizes(value["files"]), _sizes(value["streamed"])
    sizes = staged_sizes | streamed_sizes
    _require(len(sizes) == len(staged_sizes) + len(streamed_sizes), "a file is named twice")
    stream = _stream(value["slots"], memory_of, streamed_sizes, within_seconds)
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in receipt.tensors:
        for region in tensor.regions:
            _require(
                0 <= region.start <= region.start + region.size_bytes <= sizes[region.file],
                f"`{tensor.name}` leaves its file",
            )
            by_file[region.file].append(tensor)
    job = SaveJob(
        about=decode(str(value["about"]).encode(), checkpoint.manifest_key),
        files=tuple(
            StagedFile(_name(name), memory_of(name, size_bytes), tuple(by_file[name]))
            for name, size_bytes in staged_sizes.items()
        ),
        parts=receipt.parts,
        keep=tuple(_checkpoint(folder) for folder in value["keep"]),
        is_first=bool(value["is_first"]),
        topic=str(value["topic"]),
        began_seconds=float(value["began_seconds"]),
        stall_seconds=partial(float, float(value["stall_seconds"])),
        bases=tuple(DedupBase.from_json(base) for base in value["bases"]),
        has_rival=True,
        segment=_segment(value["segment"], checkpoint),
        copies_bytes_max=_bound(value.get("copies_bytes_max")),
        token=str(value["token"]),
        copy_failure=RankFailure(**failure_fields)
        if (failure_fields := value["spoiled"])
        else None,
        streamed=tuple(
            RemoteFile(_name(name), size_bytes, tuple(by_file[name]), stream)
            for name, size_bytes in streamed_sizes.items()
        ),
    )
    return job, stream


def _bound(size_bytes: Any) -> int | None:
    _require(size_bytes is None or int(size_bytes) >= 0, "a negative limit")
    return None if size_bytes is None else int(size_bytes)


def _segment(text: Any, checkpoint: CheckpointId) -> Segment | None:
    if text is None:
        return None
    return decode_segment(str(text).encode(), segment_key(checkpoint))


def _sizes(files: Any) -> dict[str, int]:
    sizes = {str(name): int(size_bytes) for name, size_bytes in files}
    _require(len(sizes) == len(files), "a file is named twice")
    return sizes


def _stream(
    names: Any,
    memory_of: Callable[[str, int], memoryview],
    sizes: Mapping[str, int],
    within_seconds: float,
) -> FileStream:
    """Return the stream for files of these sizes."""
    longest_bytes = max(sizes.values(), default=0)
    slots = [StreamBuffer(str(name), memory_of(str(name), longest_bytes)) for name in names]
    _require(bool(slots) or not sizes, "no streamed file is named")
    _require(len({slot.name for slot in slots}) == len(slots), "a slot is named twice")
    _require(min(sizes.values(), default=0) >= 0, "a negative file size")
    return FileStream(slots, within_seconds)


def _checkpoint(folder: str) -> CheckpointId:
    checkpoint = parse_checkpoint(folder)
    _require(checkpoint is not None, f"{folder!r} is not a checkpoint")
    assert checkpoint is not None, "a checkpoint id is required"  # noqa: S101
    return checkpoint


def _name(name: str) -> str:
    _require(is_file_name(name), f"{name!r} is not a file of a checkpoint")
    return name


def _require(holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(problem)
