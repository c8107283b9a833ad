"""What manifests say that a rotation must know: how good a checkpoint is, and what it needs.

A checkpoint may need files in the folders of older ones (:mod:`resilient.vault.reuse.refer`). So a
file goes only when no manifest that stays needs it. A manifest that cannot be read may need
anything in older folders, so nothing older than it goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.names import split_checkpoint_key
from resilient.vault.registry.catalog import read_in_trash, read_manifest
from resilient.vault.registry.planning import Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.manifest import Manifest
    from resilient.format.names import CheckpointId, Trashed
    from resilient.storage.store import Store

Folders = dict["CheckpointId", dict[str, int]]
"""Sizes in bytes by file name of each checkpoint folder, committed or not."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What the checkpoints that stay need in the folders of others.

    Attributes:
        keys: of the files.
        unknown: the newest of them whose needs nobody can tell; None if all are known.
        why: what is wrong with its manifest.
    """

    keys: frozenset[str] = frozenset()
    unknown: CheckpointId | None = None
    why: str = ""

    def holds(self, checkpoint: CheckpointId, name: str) -> bool:
        """Say whether a file must stay although its own checkpoint is gone."""
        if self.unknown is not None and checkpoint < self.unknown:
            return True
        return checkpoint.key(name) in self.keys


def needed_by(
    store: Store,
    staying: Iterable[CheckpointId],
    contents: Mapping[CheckpointId, Content],
    folders: Folders,
) -> Needed:
    """Return what ``staying`` need; a manifest that is gone meanwhile needs nothing any more.

    Crash: reads only.

    Args:
        store: the repository.
        staying: checkpoints whose manifests stay.
        contents: of those whose manifest has been read already.
        folders: the listing.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """
    keys: set[str] = set()
    unknown: CheckpointId | None = None
    why = ""
    for one in sorted(staying):
        content = contents.get(one) or content_of(store, one, folders)
        if content is None:
            continue
        if content.refers is None:
            unknown, why = one, content.problem
        else:
            keys |= content.refers
    return Needed(frozenset(keys), unknown, why)


def contents_of(
    store: Store, checkpoints: Iterable[CheckpointId], folders: Folders
) -> dict[CheckpointId, Content]:
    """Return what the manifests say; one that is gone meanwhile is left out.

    Crash: reads only.
    """
    found = {one: content_of(store, one, folders) for one in checkpoints}
    return {one: content for one, content in found.items() if content is not None}


def content_of(store: Store, checkpoint: CheckpointId, folders: Folders) -> Content | None:
    """Read one manifest and hold it against the listing, which costs nothing more.

    Crash: reads only.
    """
    try:
        manifest = read_manifest(store, checkpoint)
    except KeyNotFound:
        return None
    except (IntegrityError, IncompatibleCheckpoint) as error:
        return Content(problem=error.message, refers=None)
    refers = frozenset(one.name for one in manifest.files if one.origin)
    try:
        datetime.fromisoformat(manifest.created_at)
    except (TypeError, ValueError):
        return Content(problem="its `created_at` is no time", refers=refers)
    problem = absent_of(manifest, folders)
    return Content(manifest.created_at, manifest.metrics, problem, manifest.protects, refers)


def contents_in_trash(
    store: Store, trash: Mapping[CheckpointId, Trashed]
) -> dict[CheckpointId, Content]:
    """Return what manifests in the trash need; what was brought back meanwhile is left out.

    Crash: reads only.
    """
    found = {}
    for checkpoint, mark in trash.items():
        try:
            manifest = read_in_trash(store, checkpoint, mark)
        except KeyNotFound:
            continue
        except (IntegrityError, IncompatibleCheckpoint) as error:
            found[checkpoint] = Content(problem=error.message, refers=None)
            continue
        refers = frozenset(one.name for one in manifest.files if one.origin)
        found[checkpoint] = Content(manifest.created_at, refers=refers)
    return found


def absent_of(manifest: Manifest, folders: Folders) -> str:
    """Say what the listing lacks of what a restore reads, empty if nothing.

    A checkpoint that lost its parity is whole.
    """
    resized, needed = "", manifest.needed
    for one in manifest.files:
        if one.name not in needed:
            continue
        split = split_checkpoint_key(manifest.key(one.name))
        there = folders.get(split[0], {}).get(split[1]) if split else None
        if there is None:
            return f"{one.name} is missing"
        if there != one.size_bytes:
            resized = resized or f"{one.name} has another size"
    return resized
