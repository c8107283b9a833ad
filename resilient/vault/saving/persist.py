"""Host bytes to a committed checkpoint, together: write, agree, commit, rotate.

Runs beside training, in a thread or a process; it holds no tensor.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.errors import (
    DeadlineExceeded,
    Fenced,
    IntegrityError,
    PeerFailed,
    ResilientError,
    SaveAbandoned,
    SaveFailed,
    StoreUnavailable,
)
from resilient.format.manifest import Manifest, PartEntry, Receipt
from resilient.vault import facts
from resilient.vault.desk import Orders
from resilient.vault.ledger.segments import put_segment
from resilient.vault.pace import FULL_SPEED
from resilient.vault.registry.commit import commit, copy_manifest, gather_receipts, require_files
from resilient.vault.registry.signing import Signature, digests_of
from resilient.vault.reuse.glimpse import Glimpses
from resilient.vault.reuse.refer import Division, divide
from resilient.vault.rotation.rotate import discard
from resilient.vault.saving.space import require_space
from resilient.vault.saving.tidy import tidy
from resilient.vault.saving.write import write
from resilient.vault.tiers.tiers import nearest
from resilient.world.agreement import Failure, agree, attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.format.ledger import Segment
    from resilient.format.names import CheckpointId
    from resilient.format.shard import HostFile, Lending
    from resilient.vault.desk import Desk
    from resilient.vault.pace import Pace
    from resilient.vault.reuse.refer import Base


@dataclass(frozen=True, slots=True)
class Job:
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
    files: tuple[HostFile, ...]
    parts: tuple[PartEntry, ...]
    keep: tuple[CheckpointId, ...]
    is_first: bool
    topic: str
    began_seconds: float
    stall_seconds: Callable[[], float]
    bases: tuple[Base, ...] = ()
    spoiled: Failure | None = None
    streamed: tuple[Lending, ...] = ()
    has_rival: bool = False
    segment: Segment | None = None
    copies_bytes_max: int | None = None
    token: str = ""

    @property
    def content(self) -> tuple[Lending, ...]:
        """All of this rank's files."""
        return (*self.files, *self.streamed)

    @property
    def size_bytes(self) -> int:
        """Of all of them together."""
        return sum(file.size_bytes for file in self.content)


@dataclass(slots=True)
class Memory:
    """What a save leaves to the next one of this life, where both are persisted.

    Attributes:
        glimpses: of this rank's last save; spare work.
        owes_mark: the life's mark could not be put.
        rested_seconds: of the last save, by the rank that rested longest: the others waited.
    """

    glimpses: Glimpses = field(default_factory=Glimpses)
    owes_mark: bool = False
    rested_seconds: float = 0.0


def persist(desk: Desk, job: Job, memory: Memory | None = None, pace: Pace = FULL_SPEED) -> Receipt:
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
    checkpoint, memory = job.about.checkpoint, memory or Memory()
    memory.rested_seconds = 0.0
    try:
        division: Any = job.spoiled or attempt(lambda: _divide(desk, job, memory.glimpses, pace))
        require_space(desk, checkpoint, division, job.topic)
        mine = attempt(lambda: _write(desk, job, division, pace))
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
        _settle_or_tell(desk, job, memory, Orders.from_json(ruling["orders"]))
    assert isinstance(mine, Receipt), "a failure of mine would have been everyone's"  # noqa: S101
    return mine


def _divide(desk: Desk, job: Job, glimpses: Glimpses, pace: Pace) -> Division:
    if job.streamed:
        return Division(job.content, parity=desk.limits.parity)
    # What is signed stands for itself: nobody has taken the SHA-256 of what it could refer to.
    bases = () if desk.signing.key else job.bases
    # A near tier refers to nothing but itself: the durable one rotates without asking it.
    return divide(
        nearest(desk.store),
        job.about.checkpoint,
        job.files,
        job.parts,
        bases,
        parity=desk.limits.parity,
        glimpses=glimpses,
        copies_bytes_max=job.copies_bytes_max,
        told=pace.did,
    )


def _write(desk: Desk, job: Job, division: Division, pace: Pace) -> Receipt:
    checkpoint, rank, parity = job.about.checkpoint, desk.world.rank, division.parity
    bounds: Any = {
        "copies_bytes_max": job.copies_bytes_max,
        "told": pace.did,
        "token": desk.token,
    }
    written = write(desk.store, checkpoint, rank, division.files, job.parts, parity, **bounds)
    return division.complete(written)


def _shown(
    desk: Desk, job: Job, mine: Receipt | Failure, rested_seconds: float
) -> dict[str, Any] | Failure:
    if isinstance(mine, Failure):
        return mine
    return {
        "checkpoint": job.about.checkpoint.folder,
        "receipt": mine.to_json(),
        "rested_seconds": rested_seconds,
        "signed": digests_of(job.content) if desk.signing.key else {},
    }


def _commit(desk: Desk, job: Job, shown: list[Any]) -> dict[str, Any]:
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
    orders = promoter.plan(desk, manifest.checkpoint, job.keep) if promoter else Orders()
    return {
        "size_bytes": manifest.size_bytes,
        "own_bytes": manifest.own_bytes,
        "rested_seconds": max(float(one["rested_seconds"]) for one in shown),
        "orders": orders.to_json(),
    }


def _settle_or_tell(desk: Desk, job: Job, memory: Memory, orders: Orders) -> None:
    """Do what follows a commit; whatever is raised there is only an event."""
    settled = attempt(lambda: _settle(desk, job, memory, orders))
    if isinstance(settled, Failure):
        memory.owes_mark = True
        folder, cause = job.about.checkpoint.folder, settled.cause
        if isinstance(cause, ResilientError):
            desk.emit(events.RotationFailed(folder, settled.message))
        else:
            desk.emit(facts.TidyingBroke(folder, f"{settled.message}{_place_of(cause)}"))


def _place_of(error: BaseException | None) -> str:
    """Return where an error that nobody expected was raised."""
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    if not frames:
        return ""
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})"


def _settle(desk: Desk, job: Job, memory: Memory, orders: Orders) -> None:
    """Let the checkpoint go on to the durable tier, and old ones go."""
    checkpoint = job.about.checkpoint
    if desk.promoter:
        desk.promoter.committed(desk, checkpoint, orders)
        return
    retention, is_first = desk.limits.retention, job.is_first or memory.owes_mark
    is_marked = tidy(desk, desk.store, retention, checkpoint, job.keep, is_first=is_first)
    memory.owes_mark = not is_marked


def _copy(desk: Desk, checkpoint: CheckpointId) -> None:
    """Put the manifest's second copy, where parity is wanted; a failure here is only an event."""
    if not desk.limits.parity:
        return
    copied = attempt(lambda: copy_manifest(desk.store, checkpoint))
    if isinstance(copied, Failure):
        desk.tell(facts.CopyFailed(checkpoint.folder, copied.message))


def _abort(desk: Desk, job: Job, error: ResilientError) -> None:
    """Say what failed, and free the space where that cannot hurt a commit in doubt."""
    checkpoint = job.about.checkpoint
    desk.tell(events.SaveAborted(checkpoint.folder, error.message, error.hint))
    # A ruling that did not get here says nothing: who rules may put the manifest all the same.
    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)
    if desk.leads and not in_doubt and not job.has_rival:
        attempt(lambda: discard(desk.store, checkpoint, desk.token))
