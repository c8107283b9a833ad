"""The trash: what a prune let go, and can be brought back until its time there is over.

A manifest moves to another name in its folder, and nothing else happens: without its manifest the
checkpoint does not exist, for no reader of any release. The name says since when and until when,
so a listing knows what is in the trash. All files stay, those that it refers to in older folders
too. Later the manifest in the trash is deleted, and then the files that nobody needs.
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
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from resilient.checkpoint.repository_scan import Folders
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId, TrashedManifest
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class TrashPolicy:
    """How long what goes can be brought back, and what of the trash is freed.

    Attributes:
        clock: for the present time.
        seconds: how long what goes stays in the trash; 0: it is deleted at once.
        empties: whether the time is over for all that is in the trash.
    """

    clock: Clock
    seconds: float = 0.0
    empties: bool = False

    def name(self) -> str:
        """Return the name of a manifest that is put in the trash now; empty if none is."""
        if not self.seconds:
            return ""
        since = datetime.fromisoformat(self.clock.now_iso())
        return trash_name(_iso(since), _iso(since + timedelta(seconds=self.seconds)))

    def over(self, trash: Mapping[CheckpointId, TrashedManifest]) -> Iterator[CheckpointId]:
        """Yield what in the trash has been there for as long as it should."""
        now = _iso(datetime.fromisoformat(self.clock.now_iso())) if trash else ""
        yield from (one for one, mark in trash.items() if self.empties or mark.until <= now)


def put_in_trash(store: Store, checkpoint: CheckpointId, name: str) -> None:
    """Put a manifest under its name in the trash; its own is still to be deleted.

    Crash: the checkpoint is there as before; a second name of its manifest means nothing then.

    Raises:
        StoreFull: no room for it.
        StoreError: the store failed.
    """
    try:
        store.put(checkpoint.key(name), store.get(checkpoint.manifest_key))
    except KeyNotFound:
        return
    except StoreFull as error:
        raise StoreFull(
            f"no room left to put {checkpoint} in the trash; it stays, and nothing of it is lost",
            key=checkpoint.key(name),
            hint=f"resilient ckpt prune {shell_quote(store.url)} --keep-last 1 --grace 0 --dry-run",
        ) from error


def empty_expired_trash(
    store: Store, over: Collection[CheckpointId], files: Iterable[tuple[CheckpointId, str]]
) -> CheckpointId | None:
    """Delete what makes it possible to bring checkpoints back, before any other of their files.

    Who brings one back puts its manifest first and then looks whether it is still in the trash;
    here it leaves the trash first, and then it is looked for. So one of both sees the other.

    Crash: what was in the trash is there still, or is what any killed save leaves.

    Args:
        store: the repository.
        over: what is to be freed.
        files: all that is to be deleted, of other checkpoints too.

    Returns:
        One that was brought back all the same; then nothing may be deleted.

    Raises:
        StoreError: the store failed.
    """
    for checkpoint, name in files:
        if parse_trash(name):
            store.delete(checkpoint.key(name))
    return next((one for one in sorted(over) if _is_there(store, one.manifest_key)), None)


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """What came back from the trash.

    Attributes:
        prune: the id of the prune that let them go.
        back: these are committed again.
        left: why others did not come back.
        others: the ids of other prunes of which something is in the trash, newest first.
    """

    prune: str
    back: tuple[CheckpointId, ...]
    left: Mapping[CheckpointId, str]
    others: tuple[str, ...] = ()


def look_into_trash(store: Store, prune: str = "") -> RestoredCheckpoint:
    """Return what would come back.

    Crash: reads only.

    Args:
        store: the repository.
        prune: as of :func:`bring_back`.

    Raises:
        NothingToResume: nothing is in the trash, and no prune was named.
        StoreError: the store failed.
    """
    return _chosen(store, trash_of(folders_of(store)), prune)


def restore_from_trash(store: Store, prune: str = "") -> RestoredCheckpoint:
    """Bring back what a prune let go, as far as it is all there.

    Crash: each is in the trash or committed again; the same again ends it. If it names the prune,
    it never brings back more than that, however often it is given.

    Args:
        store: the repository.
        prune: its id; empty for the newest of which something is in the trash.

    Returns:
        What came back: nothing if nothing of the prune that was named is in the trash.

    Raises:
        NothingToResume: nothing is in the trash, and no prune was named.
        StoreError: the store failed.
    """
    folders = folders_of(store)
    trash = trash_of(folders)
    chosen = _chosen(store, trash, prune)
    left = {one: why for one in chosen.back if (why := _bring(store, one, trash[one], folders))}
    return replace(chosen, back=tuple(one for one in chosen.back if one not in left), left=left)


def _chosen(
    store: Store, trash: Mapping[CheckpointId, TrashedManifest], prune: str
) -> RestoredCheckpoint:
    if not (trash or prune):
        raise NothingToResume(
            f"nothing is in the trash of {store.url}: nothing was pruned, or its time was over",
            hint=f"resilient ckpt ls {shell_quote(store.url)}",
        )
    prune = prune or prunes_in(trash)[0]
    back = sorted((one for one, mark in trash.items() if mark.prune == prune), reverse=True)
    return RestoredCheckpoint(
        prune, tuple(back), {}, tuple(one for one in prunes_in(trash) if one != prune)
    )


def _bring(store: Store, checkpoint: CheckpointId, mark: TrashedManifest, folders: Folders) -> str:
    """Bring one back; return why that is not possible, empty if it is."""
    where = checkpoint.key(mark.name)
    # What cannot be read was so before it was pruned, and comes back as it was.
    with suppress(IntegrityError, IncompatibleCheckpoint, KeyNotFound):
        absent = absent_of(read_in_trash(store, checkpoint, mark), folders)
        if absent:
            return absent
    try:
        _put_back(store, checkpoint.manifest_key, store.get(where))
    except KeyNotFound:
        return "its time in the trash was over just now"
    except KeyExists:
        return ""
    if not _is_there(store, where):
        store.delete(checkpoint.manifest_key)
        return "its time in the trash was over just now"
    # Beside its manifest a mark means nothing, so it is back whether they go or not.
    with suppress(StoreError):
        for name in folders[checkpoint]:
            if parse_trash(name):
                store.delete(checkpoint.key(name))
    return ""


def _put_back(store: Store, key: str, data: bytes) -> None:
    try:
        create_record(store, key, data)
    except StoreUnavailable:
        # Only its answer may be lost: who gives the command again would bring back more.
        if not _is_there(store, key):
            raise


def _is_there(store: Store, key: str) -> bool:
    """Say whether an object is there; asked twice where no answer comes."""
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
