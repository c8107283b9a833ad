"""SaveJob: write, agree, commit, collect.

Is there room? Asked before the first byte of a save is written.

After a commit: mark the first of a life, let old ones go. A failure here is only an event.

Put one rank's files into the store, and prove what was put.

Host bytes to a committed checkpoint, together: write, agree, commit, rotate.

Runs beside training, in a thread or a process; it holds no tensor.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint import events as events_module
from resilient.checkpoint.commit import commit, copy_manifest, gather_receipts, require_files
from resilient.checkpoint.context import PostCommitPlan
from resilient.checkpoint.fenced_put import put_fenced
from resilient.checkpoint.garbage_collection import (
    collect_garbage,
    discard_uncommitted,
    scan_and_plan,
)
from resilient.checkpoint.generations import check_fence, mark_committed
from resilient.checkpoint.ledger_segments import put_segment
from resilient.checkpoint.save.dedup import DedupResult, RegionFingerprints, deduplicate
from resilient.checkpoint.signing import Signature, digests_of
from resilient.checkpoint.throttle import FULL_SPEED
from resilient.checkpoint.tiers.tiered_store import nearest_store
from resilient.checkpoint.trash import TrashPolicy
from resilient.distributed.coordination import RankFailure, agree, capture_failure
from resilient.errors import (
    DeadlineExceeded,
    Fenced,
    IntegrityError,
    PeerFailed,
    ResilientError,
    SaveAbandoned,
    SaveFailed,
    StoreFull,
    StoreUnavailable,
)
from resilient.format.digest import digest_with, no_progress
from resilient.format.manifest import FileEntry, Manifest, PartEntry, Receipt, TensorEntry
from resilient.format.parity import grouped, protect
from resilient.format.safetensors_file import ReducedFile, StreamedFile
from resilient.redaction import shell_quote
from resilient.storage.store import free_bytes
from resilient.storage.transfer import files_at_once, map_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.retention import Retention, RotationPlan
    from resilient.checkpoint.save.dedup import DedupBase
    from resilient.checkpoint.throttle import Throttle
    from resilient.format.digest import FileDigest
    from resilient.format.keys import CheckpointId
    from resilient.format.ledger import Segment
    from resilient.format.safetensors_file import FileContent, StagedFile
    from resilient.storage.store import Store

MARGIN_BYTES = 64 << 10
_MARGIN_SHARE = 64


def with_margin(size_bytes: int) -> int:
    """Return what a save of so many bytes is said to need.

    The manifest and the file system's own records take room too: 64 KiB and a 64th.
    """
    return size_bytes + size_bytes // _MARGIN_SHARE + MARGIN_BYTES


def space_topic(topic: str) -> str:
    """Return the name of the agreement about room that comes before the save ``topic``."""
    return f"{topic}/space"


def require_space(
    desk: CheckpointContext,
    checkpoint: CheckpointId,
    division: DedupResult | RankFailure,
    topic: str,
) -> None:
    """Refuse a save that the store has no room for, on all ranks and before any has written.

    A repository is one place, so the bytes of all ranks count against the least that any of
    them sees free; with a near tier for each host, those of each host against its own. Where the
    store cannot tell, nothing is refused here.

    Collective: every rank, same topic.
    Crash: nothing was stored.

    Args:
        desk: the repository and the ranks.
        checkpoint: what is about to be saved.
        division: what this rank is about to write, or why it cannot.
        topic: names the save.

    Raises:
        StoreFull: with the numbers: needed, free, and what a rotation could free.
        ResilientError: another rank failed.
    """
    mine: Any = division
    if not isinstance(division, RankFailure):
        needs_bytes = division.size_bytes
        mine = capture_failure(lambda: {"needs": needs_bytes, "free": free_bytes(desk.store)})

    def rule(shown: list[Any]) -> None:
        ranks = range(len(shown))
        for group in desk.places.groups or (tuple(ranks),):
            here = [shown[rank] for rank in group]
            free = min((one["free"] for one in here if one["free"] is not None), default=None)
            needs = with_margin(sum(one["needs"] for one in here))
            if free is not None and needs > free:
                whose = f" of ranks {', '.join(map(str, group))}" if desk.places.groups else ""
                raise _full(desk, checkpoint, needs, free, whose)

    agree(desk.comms, space_topic(topic), mine, rule, desk.limits.within_seconds)


def _full(
    desk: CheckpointContext, checkpoint: CheckpointId, needs: int, free: int, whose: str
) -> StoreFull:
    url = nearest_store(desk.store).url
    return StoreFull(
        f"no space left for it at {url}{whose}: it needs {needs} bytes with a margin, {free} are "
        f"free, and {_what_rotation_could_free(desk)}; nothing of it was written",
        key=checkpoint.folder,
        hint=f"resilient ckpt prune {shell_quote(url)} --keep-last 1 --grace 0 --dry-run",
    )


def _what_rotation_could_free(desk: CheckpointContext) -> str:
    """Say what the retention would let go now; that goes after a commit and never before."""
    try:
        found = scan_and_plan(desk.store, desk.limits.retention)
    except ResilientError as error:
        return f"what rotation could free is unknown ({error.message})"
    return f"rotation could free {found.freed_bytes}"


def collect_garbage_after_commit(
    desk: CheckpointContext,
    store: Store,
    retention: Retention,
    checkpoint: CheckpointId,
    keep: Collection[CheckpointId],
    *,
    is_first: bool,
) -> bool:
    """Mark the life's first commit in a repository and rotate there, and say what went.

    Crash: as in ``rotate``; without the mark the checkpoint is as safe as ever.

    Args:
        desk: whom to tell.
        store: the repository.
        retention: what stays there.
        checkpoint: what was committed there just now.
        keep: checkpoints that must not go.
        is_first: whether this life has committed nothing there before, or is not marked there yet.

    Returns:
        Whether the life is marked there; if not, the next call must say ``is_first`` again.
    """
    is_marked = not is_first
    try:
        if is_first:
            mark_committed(store, checkpoint.generation)
            is_marked = True
        plan = collect_garbage(
            store,
            retention,
            checkpoint.generation,
            keep,
            written=checkpoint,
            sweeps=is_first,
            grace=TrashPolicy(desk.clock),
            token=desk.token,
        )
    except ResilientError as error:
        # Who leads a place may be no coordinator, and nobody else knows.
        desk.emit(events.RetentionFailed(checkpoint.folder, error.message))
        return is_marked
    _tell(desk, checkpoint, plan)
    return is_marked


def _tell(desk: CheckpointContext, checkpoint: CheckpointId, plan: RotationPlan) -> None:
    if plan.kept:
        kept = {one.folder: list(reasons) for one, reasons in plan.kept.items()}
        desk.tell(events.RetentionPlanned(checkpoint.folder, kept))
    for one, reason in plan.damaged.items():
        desk.tell(events.BestCheckpointDamaged(one.folder, reason))
    for held in (plan.held, plan.unsure):
        if held:
            desk.tell(events.RetentionDeferred(checkpoint.folder, held))
    for one in plan.doomed:
        desk.tell(events.CheckpointDeleted(one.folder))


SMALL_BYTES = 8 << 20
"""A save that is no larger is written one file after the other: threads would not pay."""

_STREAMED_AT_ONCE_MAX = 4
"""A file without memory has its bytes made for the time that it is written."""


def write(  # noqa: PLR0913 - a save as one rank sees it
    store: Store,
    checkpoint: CheckpointId,
    rank: int,
    files: Sequence[FileContent],
    parts: Sequence[PartEntry] = (),
    parity: int = 0,
    *,
    copies_bytes_max: int | None = None,
    told: Callable[[int], None] = no_progress,
    token: str = "",
) -> Receipt:
    """Store ``files`` under the checkpoint's folder and return the receipt.

    The names hold the rank and the folder holds the generation. Another process writes the same
    names only in a repository that was restored from a backup; the token of the claim tells.

    Several large files are written at once; the receipt names them in the order given. What fails
    first ends the writing: no more files are begun, and those on their way are waited for.

    Crash: some files may be there; without a manifest the checkpoint does not exist.

    Args:
        store: where to.
        checkpoint: whose folder.
        rank: who writes; recorded with each file.
        files: host memory that nobody changes meanwhile.
        parts: the parts whose documents are among ``files``.
        parity: how many of these files may be lost later and be computed back; each costs as
            many bytes as the longest, in the store and, meanwhile, in memory.
        copies_bytes_max: memory for what is left of thinned files, if it is bounded: of those
            that do not fit together fewer are written at once.
        told: told of each piece's length when it is digested, by several threads, and may take
            its time.
        token: token of the claim that saves; empty compares the number alone.

    Raises:
        Fenced: another claim replaced this one; no committed file was changed.
        StoreError: a file could not be stored; the checkpoint will not be committed.
    """
    groups = grouped([file.name for file in files], rank, parity)
    at_once = _at_once(store, files, copies_bytes_max)
    everything = chain(files, protect(files, groups))
    place, fence = nearest_store(store), partial(check_fence, store, checkpoint.generation, token)

    def write_one(file: FileContent) -> tuple[FileEntry, Sequence[TensorEntry]]:
        with file.lend() as data:
            proof, proved = _prove(file.tensors, data, told)
            put_fenced(place, checkpoint.key(file.name), data, fence)
        return FileEntry(file.name, proof.size_bytes, proof.digest, proof.chunks, rank), proved

    stored = map_parallel(write_one, everything, at_once)
    entries = tuple(entry for entry, _ in stored)
    tensors = tuple(tensor for _, proved in stored for tensor in proved)
    return Receipt(rank, entries, tensors, tuple(parts), tuple(groups))


def _at_once(store: Store, files: Sequence[FileContent], copies_bytes_max: int | None) -> int:
    """Return how many files may be on their way at once, for the store and for memory."""
    sizes = [file.size_bytes for file in files]
    if sum(sizes) <= SMALL_BYTES:
        return 1
    at_once = files_at_once(store, max(sizes))
    if any(isinstance(file, StreamedFile) for file in files):
        at_once = min(at_once, _STREAMED_AT_ONCE_MAX)
    copied_bytes = max((one.size_bytes for one in files if isinstance(one, ReducedFile)), default=0)
    if copied_bytes and copies_bytes_max is not None:
        at_once = min(at_once, copies_bytes_max // copied_bytes)
    return max(at_once, 1)


def _prove(
    tensors: Sequence[TensorEntry], data: bytes | memoryview, told: Callable[[int], None]
) -> tuple[FileDigest, Sequence[TensorEntry]]:
    """Return the proof of a file, and its tensors with the digests of their own bytes.

    Only the digests that are not known yet are taken.
    """
    places = [one for tensor in tensors for one in tensor.regions if not one.digest]
    spans = [(one.start, one.start + one.size_bytes) for one in places]
    proof, digests = digest_with(data, spans, told)
    found = dict(zip(places, digests, strict=True))
    return proof, [
        replace(
            tensor,
            regions=tuple(replace(one, digest=one.digest or found[one]) for one in tensor.regions),
        )
        for tensor in tensors
    ]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save between staging and commit, as one rank sees it.

    Attributes:
        about: a manifest with what the run says of itself and no files.
        files: this rank's files in host memory.
        streamed: files of this rank that have no memory; they are written whole, for to find
            what did not change would take copying them once more.
        parts: the parts whose documents are among them.
        keep: checkpoints that rotation must not delete.
        is_first: whether this life has committed nothing yet.
        topic: names the agreement; the same on every rank and never used before.
        began_seconds: monotonic time when ``save`` was called.
        stall_seconds: how long training has waited for it so far.
        bases: checkpoints whose bytes may be referred to, the likeliest first.
        has_rival: whether another process may be writing the same files: the keeper that was
            given up, or the trainers that gave it up. Then a save that failed deletes nothing,
            and the files are looked for before the commit.
        spoiled: why the bytes are not what they should be, told to all in place of a receipt.
        segment: of the ledger; the coordinator puts it before the manifest that names it.
        copies_bytes_max: memory for what is left of files whose other bytes the store has, beside
            the files themselves; None if nothing bounds it.
        token: Token of the claim that saves; the daemon compares it at the fence.
    """

    about: Manifest
    files: tuple[StagedFile, ...]
    parts: tuple[PartEntry, ...]
    keep: tuple[CheckpointId, ...]
    is_first: bool
    topic: str
    began_seconds: float
    stall_seconds: Callable[[], float]
    bases: tuple[DedupBase, ...] = ()
    spoiled: RankFailure | None = None
    streamed: tuple[FileContent, ...] = ()
    has_rival: bool = False
    segment: Segment | None = None
    copies_bytes_max: int | None = None
    token: str = ""

    @property
    def content(self) -> tuple[FileContent, ...]:
        """All of this rank's files."""
        return (*self.files, *self.streamed)

    @property
    def size_bytes(self) -> int:
        """Of all of them together."""
        return sum(file.size_bytes for file in self.content)


@dataclass(slots=True)
class SaveHistory:
    """What a save leaves to the next one of this life, where both are persisted.

    Attributes:
        glimpses: of this rank's last save; spare work.
        owes_mark: the life's mark could not be put.
        rested_seconds: of the last save, by the rank that rested longest: the others waited.
    """

    glimpses: RegionFingerprints = field(default_factory=RegionFingerprints)
    owes_mark: bool = False
    rested_seconds: float = 0.0


def persist(
    desk: CheckpointContext,
    job: SaveJob,
    memory: SaveHistory | None = None,
    pace: Throttle = FULL_SPEED,
) -> Receipt:
    """Write what the store has not yet of this rank's files, agree; the coordinator commits.

    Before that it sees that there is room, and afterwards it rotates.

    Collective: every rank, same topic.
    Crash: the checkpoint exists if its manifest was put, and then it is whole; else it does not
    exist and older ones are untouched.

    Args:
        desk: the repository, the ranks, the bounds.
        job: the save.
        memory: what the last save left; it is kept up to date.
        pace: when to rest.

    Returns:
        What this rank stored of the checkpoint, which is committed.

    Raises:
        SaveFailed: it was not committed; older ones are intact.
        SaveAbandoned: the same, because another rank ended or went silent.
        Fenced: a newer life began; nothing was committed.
    """
    checkpoint, memory = job.about.checkpoint, memory or SaveHistory()
    memory.rested_seconds = 0.0
    try:
        division: Any = job.spoiled or capture_failure(
            lambda: _divide(desk, job, memory.glimpses, pace)
        )
        require_space(desk, checkpoint, division, job.topic)
        mine = capture_failure(lambda: _write(desk, job, division, pace))
        ruling = agree(
            desk.comms,
            job.topic,
            _shown(desk, job, mine, pace.rested_seconds),
            lambda shown: _commit(desk, job, shown),
            desk.limits.within_seconds,
        )
    except Fenced:
        raise
    except ResilientError as error:
        _abort(desk, job, error)
        # Whoever lost a peer is not the one to blame, and another life may well save.
        is_echo = isinstance(error, PeerFailed | DeadlineExceeded)
        raise (SaveAbandoned if is_echo else SaveFailed)(
            f"{checkpoint} was not saved: {error.message}; older checkpoints are intact",
            hint=error.hint,
        ) from error
    # Committed: from here on nothing may make a failure of it.
    memory.rested_seconds = ruling["rested_seconds"]
    took_seconds = desk.clock.monotonic_seconds() - job.began_seconds
    told = (ruling["size_bytes"], job.stall_seconds(), took_seconds, ruling["own_bytes"])
    desk.tell(events.CheckpointCommitted(checkpoint.folder, *told))
    if desk.world.is_coordinator:
        _copy(desk, checkpoint)
    if desk.leads:
        _settle_or_tell(desk, job, memory, PostCommitPlan.from_json(ruling["orders"]))
    assert isinstance(mine, Receipt), "a failure of mine would have been everyone's"  # noqa: S101
    return mine


def _divide(
    desk: CheckpointContext, job: SaveJob, glimpses: RegionFingerprints, pace: Throttle
) -> DedupResult:
    if job.streamed:
        return DedupResult(job.content, parity=desk.limits.parity)
    # What is signed stands for itself: nobody has taken the SHA-256 of what it could refer to.
    bases = () if desk.signing.key else job.bases
    # A near tier refers to nothing but itself: the durable one rotates without asking it.
    return deduplicate(
        nearest_store(desk.store),
        job.about.checkpoint,
        job.files,
        job.parts,
        bases,
        parity=desk.limits.parity,
        glimpses=glimpses,
        copies_bytes_max=job.copies_bytes_max,
        told=pace.did,
    )


def _write(desk: CheckpointContext, job: SaveJob, division: DedupResult, pace: Throttle) -> Receipt:
    checkpoint, rank, parity = job.about.checkpoint, desk.world.rank, division.parity
    bounds: Any = {
        "copies_bytes_max": job.copies_bytes_max,
        "told": pace.did,
        "token": desk.token,
    }
    written = write(desk.store, checkpoint, rank, division.files, job.parts, parity, **bounds)
    return division.complete(written)


def _shown(
    desk: CheckpointContext, job: SaveJob, mine: Receipt | RankFailure, rested_seconds: float
) -> dict[str, Any] | RankFailure:
    if isinstance(mine, RankFailure):
        return mine
    return {
        "checkpoint": job.about.checkpoint.folder,
        "receipt": mine.to_json(),
        "rested_seconds": rested_seconds,
        "signed": digests_of(job.content) if desk.signing.key else {},
    }


def _commit(desk: CheckpointContext, job: SaveJob, shown: list[Any]) -> dict[str, Any]:
    """Rule over the receipts: the manifest is put here, by the coordinator alone.

    Returns:
        Bytes of all files that the checkpoint needs, and of those that were written for it; how
        long the save rested; and what must now go on to the durable tier.
    """
    folders = sorted({str(one["checkpoint"]) for one in shown})
    if folders != [job.about.checkpoint.folder]:
        raise IntegrityError(f"ranks save different steps at once: {', '.join(folders)}")
    receipts = [Receipt.from_json(one["receipt"]) for one in shown]
    manifest = gather_receipts(job.about, receipts)
    if job.has_rival:
        require_files(desk.store, manifest)
    if job.segment is not None:
        put_segment(desk.store, job.segment, desk.token)
    key = desk.signing.key
    files = {name: digest for one in shown for name, digest in one["signed"].items()}
    commit(desk.store, manifest, Signature(key, files) if key else None, desk.token)
    promoter = desk.promoter
    orders = promoter.plan(desk, manifest.checkpoint, job.keep) if promoter else PostCommitPlan()
    return {
        "size_bytes": manifest.size_bytes,
        "own_bytes": manifest.own_bytes,
        "rested_seconds": max(float(one["rested_seconds"]) for one in shown),
        "orders": orders.to_json(),
    }


def _settle_or_tell(
    desk: CheckpointContext, job: SaveJob, memory: SaveHistory, orders: PostCommitPlan
) -> None:
    """Do what follows a commit; whatever is raised there is only an event."""
    settled = capture_failure(lambda: _settle(desk, job, memory, orders))
    if isinstance(settled, RankFailure):
        memory.owes_mark = True
        folder, cause = job.about.checkpoint.folder, settled.cause
        if isinstance(cause, ResilientError):
            desk.emit(events.RetentionFailed(folder, settled.message))
        else:
            desk.emit(
                events_module.PostCommitCleanupFailed(
                    folder, f"{settled.message}{_place_of(cause)}"
                )
            )


def _place_of(error: BaseException | None) -> str:
    """Return where an error that nobody expected was raised."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    if not frames:
        return ""
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"


def _settle(
    desk: CheckpointContext, job: SaveJob, memory: SaveHistory, orders: PostCommitPlan
) -> None:
    """Let the checkpoint go on to the durable tier, and old ones go."""
    checkpoint = job.about.checkpoint
    if desk.promoter:
        desk.promoter.committed(desk, checkpoint, orders)
        return
    retention, is_first = desk.limits.retention, job.is_first or memory.owes_mark
    is_marked = collect_garbage_after_commit(
        desk, desk.store, retention, checkpoint, job.keep, is_first=is_first
    )
    memory.owes_mark = not is_marked


def _copy(desk: CheckpointContext, checkpoint: CheckpointId) -> None:
    """Put the manifest's second copy, where parity is wanted; a failure here is only an event."""
    if not desk.limits.parity:
        return
    copied = capture_failure(lambda: copy_manifest(desk.store, checkpoint))
    if isinstance(copied, RankFailure):
        desk.tell(events_module.ManifestCopyFailed(checkpoint.folder, copied.message))


def _abort(desk: CheckpointContext, job: SaveJob, error: ResilientError) -> None:
    """Say what failed, and free the space where that cannot hurt a commit in doubt."""
    checkpoint = job.about.checkpoint
    desk.tell(events.SaveAborted(checkpoint.folder, error.message, error.hint))
    # A ruling that did not get here says nothing: who rules may put the manifest all the same.
    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)
    if desk.leads and not in_doubt and not job.has_rival:
        capture_failure(lambda: discard_uncommitted(desk.store, checkpoint, desk.token))
