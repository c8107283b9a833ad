"""Which checkpoints exist, newest first; asked of the store every time.

The line of descent decides what resume may use: the newest life's checkpoints, then its parent
and what that life saved before, and so on. A checkpoint outside the line was abandoned (a
rollback, or a process of an older life that went on) and is never resumed by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.checkpoint.generations import list_marks, list_numbers, read_generation
from resilient.checkpoint.verified_read import fetch
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.keys import (
    CHECKPOINTS,
    MANIFEST,
    CheckpointId,
    TrashedManifest,
    parse_trash,
    split_checkpoint_key,
)
from resilient.format.manifest import Manifest, decode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.storage.store import Store

STEP_MAX = 10**18


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that resume passes over, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """What resume may use.

    Attributes:
        candidates: committed checkpoints of the line of descent, in the order to try.
        abandoned: committed checkpoints outside the line that branched off from it, newest first.
        separate: those of another start from scratch; rotation leaves them alone.
        skipped: traces that resume passes over and a person should know of.
        lost: why something must have been committed although nothing is left of it; empty if
            nothing says so. With no candidates this forbids a silent start from scratch.
    """

    candidates: tuple[CheckpointId, ...]
    abandoned: tuple[CheckpointId, ...]
    separate: tuple[CheckpointId, ...]
    skipped: tuple[Skipped, ...]
    lost: str


def committed(store: Store) -> list[CheckpointId]:
    """Return every checkpoint that has a manifest, newest first by (generation, step).

    Crash: reads only.
    """
    return sorted(
        (one for one, names in folders_of(store).items() if MANIFEST in names), reverse=True
    )


def folders_of(store: Store) -> dict[CheckpointId, dict[str, int]]:
    """Return sizes in bytes by file name of each checkpoint folder, committed or not.

    Crash: reads only.
    """
    found: dict[CheckpointId, dict[str, int]] = {}
    for entry in store.list(CHECKPOINTS):
        split = split_checkpoint_key(entry.key)
        if split:
            found.setdefault(split[0], {})[split[1]] = entry.size_bytes
    return found


def trash_of(
    folders: Mapping[CheckpointId, Collection[str]],
) -> dict[CheckpointId, TrashedManifest]:
    """Return what is in the trash, by the listing alone; what has a manifest is not.

    Args:
        folders: what ``folders_of`` has returned.
    """
    found: dict[CheckpointId, TrashedManifest] = {}
    for one, names in folders.items():
        if MANIFEST not in names:
            marks = filter(None, map(parse_trash, names))
            newest = max(marks, key=lambda mark: (mark.since, mark.until), default=None)
            if newest:
                found[one] = newest
    return found


def prunes_in(trash: Mapping[CheckpointId, TrashedManifest]) -> tuple[str, ...]:
    """Return the ids of the prunes that let go what is in the trash, newest first."""
    return tuple(sorted({mark.prune for mark in trash.values()}, reverse=True))


def read_manifest(store: Store, checkpoint: CheckpointId) -> Manifest:
    """Return a committed checkpoint's manifest, proved.

    Crash: reads only.

    Raises:
        KeyNotFound: it was never committed, or was rotated away.
        IntegrityError: the manifest is damaged.
        IncompatibleCheckpoint: written by a newer release.
    """
    key = checkpoint.manifest_key
    return fetch(store, key, lambda data: decode(data, key), DOCUMENT_BYTES_MAX)


def read_copy(store: Store, checkpoint: CheckpointId) -> Manifest:
    """Return what the second copy of a manifest says, proved; for repairs alone.

    It says nothing about whether the checkpoint exists.

    Crash: reads only.

    Raises:
        KeyNotFound: there is no copy.
        IntegrityError: the copy is damaged.
        IncompatibleCheckpoint: written by a newer release.
    """
    key = checkpoint.manifest_key
    return fetch(store, checkpoint.copy_key, lambda data: decode(data, key), DOCUMENT_BYTES_MAX)


def read_in_trash(store: Store, checkpoint: CheckpointId, mark: TrashedManifest) -> Manifest:
    """Return the manifest of a checkpoint in the trash, proved; it does not exist for resume.

    Crash: reads only.

    Raises:
        KeyNotFound: it was brought back meanwhile, or its bytes are being freed.
        IntegrityError: it is damaged.
        IncompatibleCheckpoint: written by a newer release.
    """
    key = checkpoint.manifest_key
    where = checkpoint.key(mark.name)
    return fetch(store, where, lambda data: decode(data, key), DOCUMENT_BYTES_MAX)


def lineage(
    store: Store,
    folders: Mapping[CheckpointId, Collection[str]] | None = None,
    numbers: list[int] | None = None,
) -> Lineage:
    """Return what resume may use, in order, and what it passes over.

    Crash: reads only.

    Args:
        store: the repository.
        folders: what ``folders_of`` has just returned, to spare a request.
        numbers: what ``list_numbers`` has just returned, to spare a request.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """
    # Lives first: what a life began from is there at a later look, or what it has committed is.
    # The other way round a rival that saves and is followed meanwhile looks like a loss.
    numbers = list_numbers(store) if numbers is None else numbers
    folders = folders_of(store) if folders is None else folders
    whole = sorted((one for one, names in folders.items() if MANIFEST in names), reverse=True)
    lives = _Lives(store, whole, numbers)
    newest = max([*numbers, *(one.generation for one in folders)], default=0)
    line, ours, skipped, lost = _descend(lives, CheckpointId(newest, STEP_MAX))
    rest = [one for one in whole if one not in line]
    skipped += _uncommitted(folders, newer_than=line[0] if line else None)
    marks = [] if line else list_marks(store)
    if marks and not lost:
        lost = f"life {marks[-1]} committed checkpoints, and no manifest is left"
    separate = tuple(one for one in rest if not lives.joins(one.generation, ours))
    return Lineage(
        candidates=tuple(line),
        abandoned=tuple(one for one in rest if one not in separate),
        separate=separate,
        skipped=tuple(skipped),
        lost=lost,
    )


def ancestry(store: Store, checkpoint: CheckpointId) -> list[CheckpointId]:
    """Return a checkpoint and those that training went through on its way there, newest first.

    Only what is there: what was rotated away is passed over.

    Crash: reads only.

    Args:
        store: the repository.
        checkpoint: a committed one, of the line of descent or abandoned.

    Raises:
        StoreError: the store failed.
    """
    numbers = list_numbers(store)
    return _descend(_Lives(store, committed(store), numbers), checkpoint)[0]


def _descend(
    lives: _Lives, bound: CheckpointId
) -> tuple[list[CheckpointId], set[int], list[Skipped], str]:
    """Walk from ``bound`` to the first life.

    Returns:
        The line; the lives that it went through, also those of which no checkpoint of the line
        is left; what is odd; what is lost.
    """
    line: list[CheckpointId] = []
    ours: set[int] = set()
    skipped: list[Skipped] = []
    lost = ""
    while bound.generation > 0:
        own = [one for one in lives.whole if one.generation == bound.generation and one <= bound]
        line += own
        ours.add(bound.generation)
        parent, trouble = lives.parent(bound.generation)
        if trouble:
            skipped.append(trouble)
        if parent is None and own:
            break
        if parent is None:
            # A life that began from scratch and committed nothing hides nothing.
            parent = CheckpointId(bound.generation - 1, STEP_MAX)
        elif parent not in lives.whole and not line:
            lost = f"life {bound.generation} began from {parent}, which is gone"
            skipped.append(Skipped(parent.folder, "its manifest is gone"))
        bound = parent
    return line, ours, skipped, lost


class _Lives:
    """The lives' records, each read at most once."""

    def __init__(self, store: Store, whole: list[CheckpointId], numbers: list[int]) -> None:
        self.numbers = numbers
        self.whole = whole
        self._store = store
        self._parents: dict[int, tuple[CheckpointId | None, Skipped | None]] = {}

    def parent(self, number: int) -> tuple[CheckpointId | None, Skipped | None]:
        """Return where a life began; with its record unreadable, the next older checkpoint."""
        if number not in self._parents:
            self._parents[number] = self._read(number)
        return self._parents[number]

    def _read(self, number: int) -> tuple[CheckpointId | None, Skipped | None]:
        older = next((one for one in self.whole if one.generation < number), None)
        if number not in self.numbers:
            return older, None
        try:
            return read_generation(self._store, number).parent, None
        except IntegrityError as error:
            return older, Skipped(f"generation {number}", error.message)
        except KeyNotFound:
            return older, None

    def joins(self, number: int, ours: Collection[int]) -> bool:
        """Say whether a life descends from one of ``ours``, or is one."""
        while number not in ours:
            parent, _ = self.parent(number)
            if parent is None:
                return False
            number = parent.generation
        return True


def _uncommitted(
    folders: Mapping[CheckpointId, Collection[str]], newer_than: CheckpointId | None
) -> list[Skipped]:
    newer = {one: names for one, names in folders.items() if not newer_than or one > newer_than}
    trash = trash_of(newer)
    return [
        Skipped(one.folder, "has no manifest: never committed, or its manifest was deleted")
        for one in sorted(newer, reverse=True)
        if MANIFEST not in newer[one] and one not in trash
    ]
