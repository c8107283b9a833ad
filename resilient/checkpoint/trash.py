"""Trash: deleted checkpoints that can be restored until their grace period is over.

To move a checkpoint to the trash, only its manifest (table of contents) is renamed within the
folder. For readers of any release, a checkpoint without its manifest does not exist. The new name
contains the start and the end of the grace period, so a listing shows the trash. All files stay,
including the files that the checkpoint references in older folders. After the grace period, the
manifest in the trash is deleted, and then the files that no checkpoint needs.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import folders_of, prunes_in, read_in_trash, trash_of
from resilient.checkpoint.generations import create_record
from resilient.checkpoint.repository_scan import absent_of
from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyExists,
    KeyNotFound,
    NothingToResume,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from resilient.format.keys import parse_trash, trash_name
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from resilient.checkpoint.repository_scan import Folders
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId, TrashedManifest
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class TrashPolicy:
    """Grace period of deleted checkpoints, and the check whether a grace period is over.

    Attributes:
        clock: Source of the present time.
        seconds: Grace period; 0 deletes at once.
        empties: Whether everything in the trash counts as expired.
    """

    clock: Clock
    seconds: float = 0.0
    empties: bool = False

    def name(self) -> str:
        """Return the trash name of a manifest from now on; empty without a grace period."""
        if not self.seconds:
            return ""
        since = datetime.fromisoformat(self.clock.now_iso())
        return trash_name(_iso(since), _iso(since + timedelta(seconds=self.seconds)))

    def over(self, trash: Mapping[CheckpointId, TrashedManifest]) -> Iterator[CheckpointId]:
        """Yield the checkpoints in the trash whose grace period is over."""
        now = _iso(datetime.fromisoformat(self.clock.now_iso())) if trash else ""
        yield from (
            checkpoint for checkpoint, mark in trash.items() if self.empties or mark.until <= now
        )


def put_in_trash(store: Store, checkpoint: CheckpointId, name: str) -> None:
    """Copy a manifest to its name in the trash; the caller deletes the original.

    Crash: the checkpoint exists as before; a second name of its manifest is ignored then.

    Raises:
        StoreFull: There is no space for it.
        StoreError: The store failed.
    """
    try:
        store.put(checkpoint.key(name), store.get(checkpoint.manifest_key))
    except KeyNotFound:
        return
    except StoreFull as error:
        raise StoreFull(
            f"not enough space to put {checkpoint} in the trash; it stays, and nothing is lost",
            key=checkpoint.key(name),
            hint=f"resilient ckpt prune {shell_quote(store.url)} --keep-last 1 --grace 0 --dry-run",
        ) from error


def empty_expired_trash(
    store: Store,
    over: Collection[CheckpointId],
    files: Iterable[tuple[CheckpointId, str]],
    fence: Callable[[], None],
) -> CheckpointId | None:
    """Delete the trashed manifests, before any other file of their checkpoints.

    A restore stores the manifest first and then checks that the checkpoint is still in the trash.
    This function removes the checkpoint from the trash first, and then looks for its manifest. So
    at least one of the two detects the other.

    Crash: the trashed checkpoints are still there, or look like the remains of a killed save.

    Args:
        store: Repository.
        over: Checkpoints to free.
        files: All files to delete, of other checkpoints too.
        fence: Callback that raises ``Fenced`` if another claim replaced this process's claim.

    Returns:
        A checkpoint that was restored meanwhile, so that nothing may be deleted; else None.

    Raises:
        Fenced: Another claim replaced this claim; nothing more was deleted.
        StoreError: The store failed.
    """
    for checkpoint, name in files:
        if parse_trash(name):
            fence()
            store.delete(checkpoint.key(name))
    return next(
        (candidate for candidate in sorted(over) if _is_there(store, candidate.manifest_key)), None
    )


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """Result of a restore from the trash.

    Attributes:
        prune: Id of the prune that deleted the checkpoints.
        back: Checkpoints that are committed again.
        left: Reasons why others were not restored.
        others: Ids of other prunes with checkpoints in the trash, newest first.
    """

    prune: str
    back: tuple[CheckpointId, ...]
    left: Mapping[CheckpointId, str]
    others: tuple[str, ...] = ()


def look_into_trash(store: Store, prune: str = "") -> RestoredCheckpoint:
    """Return what ``restore_from_trash`` would restore.

    Crash: reads only.

    Args:
        store: Repository.
        prune: As for :func:`restore_from_trash`.

    Raises:
        NothingToResume: The trash is empty, and no prune was named.
        StoreError: The store failed.
    """
    return _select_prune(store, trash_of(folders_of(store)), prune)


def restore_from_trash(store: Store, prune: str = "") -> RestoredCheckpoint:
    """Restore the checkpoints that a prune moved to the trash, if all of their files exist.

    Crash: each checkpoint is in the trash or committed again; repeat the call to complete the
        restore. A call with a named prune never restores checkpoints of another prune.

    Args:
        store: Repository.
        prune: Id of the prune; empty for the newest one with checkpoints in the trash.

    Returns:
        The restored checkpoints: none if the named prune has none in the trash.

    Raises:
        NothingToResume: The trash is empty, and no prune was named.
        StoreError: The store failed.
    """
    folders = folders_of(store)
    trash = trash_of(folders)
    selection = _select_prune(store, trash, prune)
    failure_reasons = {
        checkpoint: reason
        for checkpoint in selection.back
        if (reason := _restore(store, checkpoint, trash[checkpoint], folders))
    }
    return replace(
        selection,
        back=tuple(
            checkpoint for checkpoint in selection.back if checkpoint not in failure_reasons
        ),
        left=failure_reasons,
    )


def _select_prune(
    store: Store, trash: Mapping[CheckpointId, TrashedManifest], prune: str
) -> RestoredCheckpoint:
    if not (trash or prune):
        raise NothingToResume(
            f"nothing is in the trash of {store.url}: nothing was pruned, or its time was over",
            hint=f"resilient ckpt ls {shell_quote(store.url)}",
        )
    prune = prune or prunes_in(trash)[0]
    restored_checkpoints = sorted(
        (checkpoint for checkpoint, mark in trash.items() if mark.prune == prune), reverse=True
    )
    return RestoredCheckpoint(
        prune,
        tuple(restored_checkpoints),
        {},
        tuple(checkpoint for checkpoint in prunes_in(trash) if checkpoint != prune),
    )


def _restore(
    store: Store, checkpoint: CheckpointId, mark: TrashedManifest, folders: Folders
) -> str:
    """Restore one checkpoint; return why that is not possible, empty if it is."""
    trash_key = checkpoint.key(mark.name)
    # An unreadable manifest was unreadable before the prune, and is restored as it was.
    with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        problem = absent_of(read_in_trash(store, checkpoint, mark), folders)
        if problem:
            return problem
    try:
        _create_manifest(store, checkpoint.manifest_key, store.get(trash_key))
    except KeyNotFound:
        return "its time in the trash was over just now"
    except KeyExists:
        return ""
    if not _is_there(store, trash_key):
        store.delete(checkpoint.manifest_key)
        return "its time in the trash was over just now"
    # Beside its manifest a trash mark is ignored, so the checkpoint is back in any case.
    with suppress(StoreError):
        for name in folders[checkpoint]:
            if parse_trash(name):
                store.delete(checkpoint.key(name))
    return ""


def _create_manifest(store: Store, key: str, data: bytes) -> None:
    try:
        create_record(store, key, data)
    except StoreUnavailable:
        # Only the response may be lost. A repeated command would restore another prune.
        if not _is_there(store, key):
            raise


def _is_there(store: Store, key: str) -> bool:
    """Return whether an object exists; asked twice if no response arrives."""
    try:
        with suppress(StoreUnavailable):
            return _is_stored(store, key)
        return _is_stored(store, key)
    except KeyNotFound:
        return False


def _is_stored(store: Store, key: str) -> bool:
    store.stat(key)
    return True


def _iso(moment: datetime) -> str:
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
