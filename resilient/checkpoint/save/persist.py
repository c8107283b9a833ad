"""Persistence of a save: write of files, agreement of ranks, commit, and garbage collection.

All ranks together write bytes in host memory as a committed checkpoint. The save runs in a thread
or in the saver daemon (a process per host) while training continues. The save works on bytes, not
on tensors. Free space is checked before the first byte is written. An error after the commit is
only reported as an event.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint import events as checkpoint_events
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
    """Return the bytes that a save of ``size_bytes`` needs with a margin.

    The manifest and the records of the file system need space too: 64 KiB plus 1/64.
    """
    return size_bytes + size_bytes // _MARGIN_SHARE + MARGIN_BYTES


def space_topic(topic: str) -> str:
    """Return the topic of the space check that precedes the save ``topic``."""
    return f"{topic}/space"


def require_space(
    context: CheckpointContext,
    checkpoint: CheckpointId,
    dedup_result: DedupResult | RankFailure,
    topic: str,
) -> None:
    """Refuse a save that does not fit into the store, on all ranks, before any rank writes.

    All ranks share one repository, so the bytes of all ranks count against the smallest free space
    that any rank sees. With a near tier per host, the bytes of each host count against the space of
    that host. If the store does not report free space, nothing is refused here.

    Collective: every rank, same topic.
    Crash: nothing was stored.

    Args:
        context: Context: repository and ranks.
        checkpoint: Checkpoint about to be saved.
        dedup_result: Dedup result of this rank, or the failure that prevents the save.
        topic: Topic of the save.

    Raises:
        StoreFull: Not enough space; the error shows the needed, free and reclaimable bytes.
        ResilientError: Another rank failed.
    """
    own_result: Any = dedup_result
    if not isinstance(dedup_result, RankFailure):
        needs_bytes = dedup_result.size_bytes
        own_result = capture_failure(
            lambda: {"needs": needs_bytes, "free": free_bytes(context.store)}
        )

    def rule(answers: list[Any]) -> None:
        ranks = range(len(answers))
        for group in context.places.groups or (tuple(ranks),):
            group_answers = [answers[rank] for rank in group]
            free = min(
                (report["free"] for report in group_answers if report["free"] is not None),
                default=None,
            )
            needs = with_margin(sum(report["needs"] for report in group_answers))
            if free is not None and needs > free:
                ranks_text = (
                    f" of ranks {', '.join(map(str, group))}" if context.places.groups else ""
                )
                raise _space_error(context, checkpoint, needs, free, ranks_text)

    agree(context.comms, space_topic(topic), own_result, rule, context.limits.within_seconds)


def _space_error(
    context: CheckpointContext, checkpoint: CheckpointId, needs: int, free: int, ranks_text: str
) -> StoreFull:
    url = nearest_store(context.store).url
    return StoreFull(
        f"not enough space at {url}{ranks_text}: the save needs {needs} bytes with a margin, "
        f"{free} are free, and {_describe_freeable(context)}; nothing was written",
        key=checkpoint.folder,
        hint=f"resilient ckpt prune {shell_quote(url)} --keep-last 1 --grace 0 --dry-run",
    )


def _describe_freeable(context: CheckpointContext) -> str:
    """Describe what retention could delete now; that is deleted only after a commit."""
    try:
        scan = scan_and_plan(context.store, context.limits.retention)
    except ResilientError as error:
        return f"the size that garbage collection could free is unknown ({error.message})"
    return f"garbage collection could free {scan.freed_bytes}"


def collect_garbage_after_commit(
    context: CheckpointContext,
    store: Store,
    retention: Retention,
    checkpoint: CheckpointId,
    keep: Collection[CheckpointId],
    *,
    is_first: bool,
) -> bool:
    """Mark the attempt's first commit in a repository, collect garbage there, and emit events.

    Crash: as in ``collect_garbage``; without the mark the checkpoint is equally safe.

    Args:
        context: Context for events, time and the claim.
        store: Repository.
        retention: Retention policy of that repository.
        checkpoint: Checkpoint that was just committed there.
        keep: Checkpoints that must not be deleted.
        is_first: Whether this attempt has committed nothing there before, or is not marked yet.

    Returns:
        Whether the mark is stored; if not, pass ``is_first`` again at the next call.
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
            grace=TrashPolicy(context.clock),
            token=context.token,
        )
    except ResilientError as error:
        # The leader of a place may not be the coordinator, and no other rank knows of this error.
        context.emit(events.RetentionFailed(checkpoint.folder, error.message))
        return is_marked
    _report_plan(context, checkpoint, plan)
    return is_marked


def _report_plan(context: CheckpointContext, checkpoint: CheckpointId, plan: RotationPlan) -> None:
    if plan.kept:
        reasons_by_folder = {
            candidate.folder: list(reasons) for candidate, reasons in plan.kept.items()
        }
        context.emit_once(events.RetentionPlanned(checkpoint.folder, reasons_by_folder))
    for candidate, reason in plan.damaged.items():
        context.emit_once(events.BestCheckpointDamaged(candidate.folder, reason))
    for delay_reason in (plan.held, plan.unsure):
        if delay_reason:
            context.emit_once(events.RetentionDeferred(checkpoint.folder, delay_reason))
    for candidate in plan.doomed:
        context.emit_once(events.CheckpointDeleted(candidate.folder))


SMALL_BYTES = 8 << 20
"""A save of at most this size is written file by file, because threads would not pay."""

_STREAMED_AT_ONCE_MAX = 4
"""Limit on concurrent streamed files: each has its bytes in memory while it is written."""


def write(  # noqa: PLR0913 - a save as one rank sees it
    store: Store,
    checkpoint: CheckpointId,
    rank: int,
    files: Sequence[FileContent],
    parts: Sequence[PartEntry] = (),
    parity: int = 0,
    *,
    copies_bytes_max: int | None = None,
    on_progress: Callable[[int], None] = no_progress,
    token: str = "",
) -> Receipt:
    """Store ``files`` in the checkpoint's folder and return the receipt.

    File names contain the rank, and the folder name contains the generation. Another process writes
    the same names only in a repository that was restored from a backup. The token of the claim
    detects such a process.

    Several large files are written at once; the receipt lists them in the given order. After the
    first failure this function begins no further file, and waits for the files in progress.

    Crash: some files may be there; without a manifest the checkpoint does not exist.

    Args:
        store: Repository.
        checkpoint: Checkpoint whose folder receives the files.
        rank: Writing rank; recorded with each file.
        files: Host memory that does not change meanwhile.
        parts: Parts whose documents are among ``files``.
        parity: Number of these files that may be lost later and are reconstructed. Each costs as
            many bytes as the longest file, in the store and, meanwhile, in memory.
        copies_bytes_max: Memory for the remaining bytes of reduced files; None for no limit. If the
            files do not fit together, fewer files are written at once.
        on_progress: Callback with the length of each digested piece, from several threads; it may
            block.
        token: Token of the claim that saves; empty compares the number alone.

    Raises:
        Fenced: Another claim replaced this claim; no committed file was changed.
        StoreError: A file could not be stored; the checkpoint will not be committed.
    """
    groups = grouped([file.name for file in files], rank, parity)
    at_once = _at_once(store, files, copies_bytes_max)
    all_files = chain(files, protect(files, groups))
    place, fence = nearest_store(store), partial(check_fence, store, checkpoint.generation, token)

    def write_one(file: FileContent) -> tuple[FileEntry, Sequence[TensorEntry]]:
        with file.lend() as data:
            proof, proved_tensors = _digest(file.tensors, data, on_progress)
            put_fenced(place, checkpoint.key(file.name), data, fence)
        return FileEntry(
            file.name, proof.size_bytes, proof.digest, proof.chunks, rank
        ), proved_tensors

    written_files = map_parallel(write_one, all_files, at_once)
    entries = tuple(entry for entry, _ in written_files)
    tensors = tuple(tensor for _, proved_tensors in written_files for tensor in proved_tensors)
    return Receipt(rank, entries, tensors, tuple(parts), tuple(groups))


def _at_once(store: Store, files: Sequence[FileContent], copies_bytes_max: int | None) -> int:
    """Return how many files may be written at once, limited by the store and by memory."""
    sizes = [file.size_bytes for file in files]
    if sum(sizes) <= SMALL_BYTES:
        return 1
    at_once = files_at_once(store, max(sizes))
    if any(isinstance(file, StreamedFile) for file in files):
        at_once = min(at_once, _STREAMED_AT_ONCE_MAX)
    copied_bytes = max(
        (file.size_bytes for file in files if isinstance(file, ReducedFile)), default=0
    )
    if copied_bytes and copies_bytes_max is not None:
        at_once = min(at_once, copies_bytes_max // copied_bytes)
    return max(at_once, 1)


def _digest(
    tensors: Sequence[TensorEntry], data: bytes | memoryview, on_progress: Callable[[int], None]
) -> tuple[FileDigest, Sequence[TensorEntry]]:
    """Return the digests of a file, and its tensors with the digests of their own bytes.

    Computes only the digests that are not known yet.
    """
    places = [region for tensor in tensors for region in tensor.regions if not region.digest]
    spans = [(place.start, place.start + place.size_bytes) for place in places]
    proof, digests = digest_with(data, spans, on_progress)
    digest_by_place = dict(zip(places, digests, strict=True))
    return proof, [
        replace(
            tensor,
            regions=tuple(
                replace(region, digest=region.digest or digest_by_place[region])
                for region in tensor.regions
            ),
        )
        for tensor in tensors
    ]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One save between staging and commit, as one rank sees it.

    Attributes:
        about: Manifest with the run's own content and no files.
        files: This rank's files in host memory.
        streamed: Files of this rank that are not in memory. They are written whole, because
            deduplication would need one more copy.
        parts: Parts whose documents are among the files.
        keep: Checkpoints that retention must not delete.
        is_first: Whether this attempt has committed nothing yet.
        topic: Topic of the agreement; equal on every rank and never used before.
        began_seconds: Monotonic time when ``save`` was called.
        stall_seconds: Time that training has waited for the save so far.
        bases: Dedup bases, the likeliest first.
        has_rival: Whether another process may write the same files: the daemon that was given up,
            or the trainers that gave it up. Then a failed save deletes nothing, and the files are
            checked before the commit.
        copy_failure: Failure that makes the bytes worthless. All ranks receive it instead
            of a receipt.
        segment: Ledger segment; the coordinator stores it before the manifest that names it.
        copies_bytes_max: Memory for the remaining bytes of reduced files, in addition to the
            files; None for no limit.
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
    copy_failure: RankFailure | None = None
    streamed: tuple[FileContent, ...] = ()
    has_rival: bool = False
    segment: Segment | None = None
    copies_bytes_max: int | None = None
    token: str = ""

    @property
    def content(self) -> tuple[FileContent, ...]:
        """All files of this rank."""
        return (*self.files, *self.streamed)

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.content)


@dataclass(slots=True)
class SaveHistory:
    """State that a save leaves for the next save of the attempt in the same process.

    Attributes:
        fingerprints: Fingerprints of this rank's last save, which save work.
        owes_mark: Whether the mark of the attempt could not be stored.
        rested_seconds: Pauses of the rank that paused longest in the last save.
    """

    fingerprints: RegionFingerprints = field(default_factory=RegionFingerprints)
    owes_mark: bool = False
    rested_seconds: float = 0.0


def persist(
    context: CheckpointContext,
    job: SaveJob,
    history: SaveHistory | None = None,
    throttle: Throttle = FULL_SPEED,
) -> Receipt:
    """Write the new bytes of this rank's files and agree; the coordinator commits.

    Checks the free space before writing, and collects garbage after the commit.

    Collective: every rank, same topic.
    Crash: if its manifest was stored, the checkpoint exists and is whole. Otherwise it does not
        exist. Older checkpoints are untouched in both cases.

    Args:
        context: Context: repository, ranks and options.
        job: The save.
        history: History of the last save; it is updated.
        throttle: Throttle that inserts the pauses.

    Returns:
        Receipt of this rank for the committed checkpoint.

    Raises:
        SaveFailed: The save was not committed; older checkpoints are intact.
        SaveAbandoned: As above, because another rank ended or did not answer.
        Fenced: A newer generation exists; nothing was committed.
    """
    checkpoint, history = job.about.checkpoint, history or SaveHistory()
    history.rested_seconds = 0.0
    try:
        dedup_result: Any = job.copy_failure or capture_failure(
            lambda: _deduplicate(context, job, history.fingerprints, throttle)
        )
        require_space(context, checkpoint, dedup_result, job.topic)
        receipt = capture_failure(lambda: _write(context, job, dedup_result, throttle))
        ruling = agree(
            context.comms,
            job.topic,
            _summary_for_peers(context, job, receipt, throttle.rested_seconds),
            lambda answers: _commit(context, job, answers),
            context.limits.within_seconds,
        )
    except Fenced:
        raise
    except ResilientError as error:
        _abort(context, job, error)
        # The rank that lost a peer is not the cause of the failure, and the next attempt may save.
        is_peer_loss = isinstance(error, PeerFailed | DeadlineExceeded)
        raise (SaveAbandoned if is_peer_loss else SaveFailed)(
            f"{checkpoint} was not saved: {error.message}; older checkpoints are intact",
            hint=error.hint,
        ) from error
    # Committed: from here on no error may turn the save into a failure.
    history.rested_seconds = ruling["rested_seconds"]
    took_seconds = context.clock.monotonic_seconds() - job.began_seconds
    saved_facts = (ruling["size_bytes"], job.stall_seconds(), took_seconds, ruling["own_bytes"])
    context.emit_once(events.CheckpointCommitted(checkpoint.folder, *saved_facts))
    if context.world.is_coordinator:
        _copy(context, checkpoint)
    if context.is_near_tier_leader:
        _clean_up_or_report(context, job, history, PostCommitPlan.from_json(ruling["orders"]))
    assert isinstance(receipt, Receipt), "a failure of this rank fails all ranks"  # noqa: S101
    return receipt


def _deduplicate(
    context: CheckpointContext, job: SaveJob, fingerprints: RegionFingerprints, throttle: Throttle
) -> DedupResult:
    if job.streamed:
        return DedupResult(job.content, parity=context.limits.parity)
    # A signed checkpoint is self-contained: no SHA-256 is known for files it could reference.
    bases = () if context.signing.key else job.bases
    # A near tier references only itself: the durable tier deletes without asking the near tier.
    return deduplicate(
        nearest_store(context.store),
        job.about.checkpoint,
        job.files,
        job.parts,
        bases,
        parity=context.limits.parity,
        last_fingerprints=fingerprints,
        copies_bytes_max=job.copies_bytes_max,
        on_progress=throttle.after_write,
    )


def _write(
    context: CheckpointContext, job: SaveJob, dedup_result: DedupResult, throttle: Throttle
) -> Receipt:
    checkpoint, rank, parity = job.about.checkpoint, context.world.rank, dedup_result.parity
    bounds: Any = {
        "copies_bytes_max": job.copies_bytes_max,
        "on_progress": throttle.after_write,
        "token": context.token,
    }
    write_result = write(
        context.store, checkpoint, rank, dedup_result.files, job.parts, parity, **bounds
    )
    return dedup_result.complete(write_result)


def _summary_for_peers(
    context: CheckpointContext, job: SaveJob, receipt: Receipt | RankFailure, rested_seconds: float
) -> dict[str, Any] | RankFailure:
    if isinstance(receipt, RankFailure):
        return receipt
    return {
        "checkpoint": job.about.checkpoint.folder,
        "receipt": receipt.to_json(),
        "rested_seconds": rested_seconds,
        "signed": digests_of(job.content) if context.signing.key else {},
    }


def _commit(context: CheckpointContext, job: SaveJob, answers: list[Any]) -> dict[str, Any]:
    """Check the receipts and store the manifest; for the coordinator only.

    Returns:
        Bytes of all files that the checkpoint needs and of those written for it; seconds paused;
        and the plan for the durable tier.
    """
    folders = sorted({str(report["checkpoint"]) for report in answers})
    if folders != [job.about.checkpoint.folder]:
        raise IntegrityError(f"ranks save different steps at the same time: {', '.join(folders)}")
    receipts = [Receipt.from_json(report["receipt"]) for report in answers]
    manifest = gather_receipts(job.about, receipts)
    if job.has_rival:
        require_files(context.store, manifest)
    if job.segment is not None:
        put_segment(context.store, job.segment, context.token)
    key = context.signing.key
    files = {name: digest for report in answers for name, digest in report["signed"].items()}
    commit(context.store, manifest, Signature(key, files) if key else None, context.token)
    promoter = context.promoter
    post_commit_plan = (
        promoter.plan(context, manifest.checkpoint, job.keep) if promoter else PostCommitPlan()
    )
    return {
        "size_bytes": manifest.size_bytes,
        "own_bytes": manifest.own_bytes,
        "rested_seconds": max(float(report["rested_seconds"]) for report in answers),
        "orders": post_commit_plan.to_json(),
    }


def _clean_up_or_report(
    context: CheckpointContext, job: SaveJob, history: SaveHistory, post_commit_plan: PostCommitPlan
) -> None:
    """Run the cleanup after a commit; any error there is only an event."""
    cleanup_result = capture_failure(lambda: _clean_up(context, job, history, post_commit_plan))
    if isinstance(cleanup_result, RankFailure):
        history.owes_mark = True
        folder, cause = job.about.checkpoint.folder, cleanup_result.cause
        if isinstance(cause, ResilientError):
            context.emit(events.RetentionFailed(folder, cleanup_result.message))
        else:
            context.emit(
                checkpoint_events.PostCommitCleanupFailed(
                    folder, f"{cleanup_result.message}{_place_of(cause)}"
                )
            )


def _place_of(error: BaseException | None) -> str:
    """Return the source location of an unexpected error."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    if not frames:
        return ""
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"


def _clean_up(
    context: CheckpointContext, job: SaveJob, history: SaveHistory, post_commit_plan: PostCommitPlan
) -> None:
    """Start the promotion of the checkpoint, or collect garbage."""
    checkpoint = job.about.checkpoint
    if context.promoter:
        context.promoter.committed(context, checkpoint, post_commit_plan)
        return
    retention, is_first = context.limits.retention, job.is_first or history.owes_mark
    is_marked = collect_garbage_after_commit(
        context, context.store, retention, checkpoint, job.keep, is_first=is_first
    )
    history.owes_mark = not is_marked


def _copy(context: CheckpointContext, checkpoint: CheckpointId) -> None:
    """Store the second copy of the manifest if parity is on; an error is only an event."""
    if not context.limits.parity:
        return
    copy_result = capture_failure(lambda: copy_manifest(context.store, checkpoint))
    if isinstance(copy_result, RankFailure):
        context.emit_once(
            checkpoint_events.ManifestCopyFailed(checkpoint.folder, copy_result.message)
        )


def _abort(context: CheckpointContext, job: SaveJob, error: ResilientError) -> None:
    """Emit the failure, and free the space unless the commit is in doubt."""
    checkpoint = job.about.checkpoint
    context.emit_once(events.SaveAborted(checkpoint.folder, error.message, error.hint))
    # After a lost decision the outcome is unknown: the coordinator may still store the manifest.
    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)
    if context.is_near_tier_leader and not in_doubt and not job.has_rival:
        capture_failure(lambda: discard_uncommitted(context.store, checkpoint, context.token))
