"""Lists of committed checkpoints, and the line of descent: the checkpoints that resume may use.

Each call reads the store. An attempt of a run has a number, its generation. The attempt starts from
scratch or from a checkpoint, its parent. The line of descent begins with the checkpoints of the
newest generation. Then follow the parent of this generation and the earlier checkpoints of the
parent's generation, and so on.

All other checkpoints are abandoned, for one of three reasons: a rollback, a new start from scratch,
or an older process that continued. Resume selects an abandoned checkpoint only if the user names
the checkpoint.
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
    """Object that resume skips, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """Checkpoints that resume may use, and all others.

    Attributes:
        candidates: Committed checkpoints of the line of descent, in the order to try.
        abandoned: Committed checkpoints that branched off from the line, newest first.
        separate: Checkpoints of another start from scratch; retention leaves them alone.
        skipped: Objects that resume skips and that a user should see.
        lost: Evidence that a checkpoint was committed although none is left; empty without
            evidence. If there are no candidates either, training must not start from scratch
            silently.
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
        (checkpoint for checkpoint, names in folders_of(store).items() if MANIFEST in names),
        reverse=True,
    )


def folders_of(store: Store) -> dict[CheckpointId, dict[str, int]]:
    """Return the files of each checkpoint folder, committed or not, with their sizes in bytes.

    Crash: reads only.
    """
    sizes_by_checkpoint: dict[CheckpointId, dict[str, int]] = {}
    for entry in store.list(CHECKPOINTS):
        split = split_checkpoint_key(entry.key)
        if split:
            sizes_by_checkpoint.setdefault(split[0], {})[split[1]] = entry.size_bytes
    return sizes_by_checkpoint


def trash_of(
    folders: Mapping[CheckpointId, Collection[str]],
) -> dict[CheckpointId, TrashedManifest]:
    """Return the checkpoints in the trash, from the listing alone; none of them has a manifest.

    Args:
        folders: Result of ``folders_of``.
    """
    manifests: dict[CheckpointId, TrashedManifest] = {}
    for checkpoint, names in folders.items():
        if MANIFEST not in names:
            marks = filter(None, map(parse_trash, names))
            newest = max(marks, key=lambda mark: (mark.since, mark.until), default=None)
            if newest:
                manifests[checkpoint] = newest
    return manifests


def prunes_in(trash: Mapping[CheckpointId, TrashedManifest]) -> tuple[str, ...]:
    """Return the ids of the prunes with checkpoints in the trash, newest first."""
    return tuple(sorted({mark.prune for mark in trash.values()}, reverse=True))


def read_manifest(store: Store, checkpoint: CheckpointId) -> Manifest:
    """Read and verify the manifest of a committed checkpoint.

    Crash: reads only.

    Raises:
        KeyNotFound: The checkpoint was never committed, or was deleted.
        IntegrityError: The manifest is damaged.
        IncompatibleCheckpoint: A newer release wrote it.
    """
    key = checkpoint.manifest_key
    return fetch(store, key, lambda data: decode(data, key), DOCUMENT_BYTES_MAX)


def read_copy(store: Store, checkpoint: CheckpointId) -> Manifest:
    """Read and verify the second copy of a manifest; for repairs only.

    The copy does not prove that the checkpoint exists.

    Crash: reads only.

    Raises:
        KeyNotFound: There is no copy.
        IntegrityError: The copy is damaged.
        IncompatibleCheckpoint: A newer release wrote it.
    """
    key = checkpoint.manifest_key
    return fetch(store, checkpoint.copy_key, lambda data: decode(data, key), DOCUMENT_BYTES_MAX)


def read_in_trash(store: Store, checkpoint: CheckpointId, mark: TrashedManifest) -> Manifest:
    """Read and verify the manifest of a checkpoint in the trash, which resume ignores.

    Crash: reads only.

    Raises:
        KeyNotFound: The checkpoint was restored meanwhile, or is being deleted.
        IntegrityError: The manifest is damaged.
        IncompatibleCheckpoint: A newer release wrote it.
    """
    key = checkpoint.manifest_key
    trash_key = checkpoint.key(mark.name)
    return fetch(store, trash_key, lambda data: decode(data, key), DOCUMENT_BYTES_MAX)


def lineage(
    store: Store,
    folders: Mapping[CheckpointId, Collection[str]] | None = None,
    numbers: list[int] | None = None,
) -> Lineage:
    """Return the checkpoints that resume may use, in order, and what it skips.

    Crash: reads only.

    Args:
        store: Repository.
        folders: Recent result of ``folders_of``, to save a request.
        numbers: Recent result of ``list_numbers``, to save a request.

    Raises:
        StoreError: The store failed, so it is unknown which checkpoints exist.
    """
    # List the generations first: the later listing of folders then has the parent of each
    # generation or its own checkpoints. In the other order, the folders could lack a parent that
    # another process committed meanwhile, and this would look like a loss.
    numbers = list_numbers(store) if numbers is None else numbers
    folders = folders_of(store) if folders is None else folders
    committed_checkpoints = sorted(
        (checkpoint for checkpoint, names in folders.items() if MANIFEST in names), reverse=True
    )
    generations = _GenerationCache(store, committed_checkpoints, numbers)
    newest = max([*numbers, *(folder.generation for folder in folders)], default=0)
    line, line_generations, skipped, loss_text = _descend(
        generations, CheckpointId(newest, STEP_MAX)
    )
    off_line = [checkpoint for checkpoint in committed_checkpoints if checkpoint not in line]
    skipped += _uncommitted(folders, newer_than=line[0] if line else None)
    marks = [] if line else list_marks(store)
    if marks and not loss_text:
        loss_text = f"generation {marks[-1]} committed checkpoints, and no manifest is left"
    separate = tuple(
        checkpoint
        for checkpoint in off_line
        if not generations.descends_from_any(checkpoint.generation, line_generations)
    )
    return Lineage(
        candidates=tuple(line),
        abandoned=tuple(checkpoint for checkpoint in off_line if checkpoint not in separate),
        separate=separate,
        skipped=tuple(skipped),
        lost=loss_text,
    )


def ancestry(store: Store, checkpoint: CheckpointId) -> list[CheckpointId]:
    """Return a checkpoint and its existing ancestors in the training history, newest first.

    Deleted ancestors are left out.

    Crash: reads only.

    Args:
        store: Repository.
        checkpoint: Committed checkpoint, of the line of descent or abandoned.

    Raises:
        StoreError: The store failed.
    """
    numbers = list_numbers(store)
    return _descend(_GenerationCache(store, committed(store), numbers), checkpoint)[0]


def _descend(
    generations: _GenerationCache, bound: CheckpointId
) -> tuple[list[CheckpointId], set[int], list[Skipped], str]:
    """Walk from ``bound`` to the first generation.

    Returns:
        The line; its generations, also those without a remaining checkpoint; skipped objects; and
        the evidence of a loss.
    """
    line: list[CheckpointId] = []
    visited_generations: set[int] = set()
    skipped: list[Skipped] = []
    loss_text = ""
    while bound.generation > 0:
        own_checkpoints = [
            checkpoint
            for checkpoint in generations.committed_checkpoints
            if checkpoint.generation == bound.generation and checkpoint <= bound
        ]
        line += own_checkpoints
        visited_generations.add(bound.generation)
        parent, problem = generations.parent(bound.generation)
        if problem:
            skipped.append(problem)
        if parent is None and own_checkpoints:
            break
        if parent is None:
            # An attempt from scratch without a commit does not hide older checkpoints.
            parent = CheckpointId(bound.generation - 1, STEP_MAX)
        elif parent not in generations.committed_checkpoints and not line:
            loss_text = (
                f"generation {bound.generation} started from {parent}, which no longer exists"
            )
            skipped.append(Skipped(parent.folder, "its manifest was deleted"))
        bound = parent
    return line, visited_generations, skipped, loss_text


class _GenerationCache:
    """Generation records, each read at most once."""

    def __init__(
        self, store: Store, committed_checkpoints: list[CheckpointId], numbers: list[int]
    ) -> None:
        self.numbers = numbers
        self.committed_checkpoints = committed_checkpoints
        self._store = store
        self._parents: dict[int, tuple[CheckpointId | None, Skipped | None]] = {}

    def parent(self, number: int) -> tuple[CheckpointId | None, Skipped | None]:
        """Return a generation's parent; if its record is unreadable, the next older checkpoint."""
        if number not in self._parents:
            self._parents[number] = self._read(number)
        return self._parents[number]

    def _read(self, number: int) -> tuple[CheckpointId | None, Skipped | None]:
        older = next(
            (
                checkpoint
                for checkpoint in self.committed_checkpoints
                if checkpoint.generation < number
            ),
            None,
        )
        if number not in self.numbers:
            return older, None
        try:
            return read_generation(self._store, number).parent, None
        except IntegrityError as error:
            return older, Skipped(f"generation {number}", error.message)
        except KeyNotFound:
            return older, None

    def descends_from_any(self, number: int, ancestors: Collection[int]) -> bool:
        """Return whether a generation is one of ``ancestors``, or descends from one."""
        while number not in ancestors:
            parent, _ = self.parent(number)
            if parent is None:
                return False
            number = parent.generation
        return True


def _uncommitted(
    folders: Mapping[CheckpointId, Collection[str]], newer_than: CheckpointId | None
) -> list[Skipped]:
    newer = {
        checkpoint: names
        for checkpoint, names in folders.items()
        if not newer_than or checkpoint > newer_than
    }
    trash = trash_of(newer)
    return [
        Skipped(checkpoint.folder, "has no manifest: never committed, or its manifest was deleted")
        for checkpoint in sorted(newer, reverse=True)
        if MANIFEST not in newer[checkpoint] and checkpoint not in trash
    ]
