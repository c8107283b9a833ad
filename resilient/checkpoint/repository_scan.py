"""What a repository holds and what nobody needs.

What manifests say that a rotation must know: how good a checkpoint is, and what it needs.

A checkpoint may need files in the folders of older ones (:mod:`resilient.checkpoint.save.dedup`). So a
file goes only when no manifest that stays needs it. A manifest that cannot be read may need
anything in older folders, so nothing older than it goes.

A repository as a rotation found it, and which files nobody will need. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import read_in_trash, read_manifest
from resilient.checkpoint.retention import CheckpointSummary
from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.keys import MANIFEST, split_checkpoint_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.checkpoint.retention import RotationPlan
    from resilient.format.keys import CheckpointId, TrashedManifest
    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store

Folders = dict["CheckpointId", dict[str, int]]
"""Sizes in bytes by file name of each checkpoint folder, committed or not."""


@dataclass(frozen=True, slots=True)
class ReferencedFiles:
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
    contents: Mapping[CheckpointId, CheckpointSummary],
    folders: Folders,
) -> ReferencedFiles:
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
    return ReferencedFiles(frozenset(keys), unknown, why)


def contents_of(
    store: Store, checkpoints: Iterable[CheckpointId], folders: Folders
) -> dict[CheckpointId, CheckpointSummary]:
    """Return what the manifests say; one that is gone meanwhile is left out.

    Crash: reads only.
    """
    found = {one: content_of(store, one, folders) for one in checkpoints}
    return {one: content for one, content in found.items() if content is not None}


def content_of(
    store: Store, checkpoint: CheckpointId, folders: Folders
) -> CheckpointSummary | None:
    """Read one manifest and hold it against the listing, which costs nothing more.

    Crash: reads only.
    """
    try:
        manifest = read_manifest(store, checkpoint)
    except KeyNotFound:
        return None
    except (IntegrityError, IncompatibleCheckpoint) as error:
        return CheckpointSummary(problem=error.message, refers=None)
    refers = frozenset(one.name for one in manifest.files if one.origin)
    try:
        datetime.fromisoformat(manifest.created_at)
    except (TypeError, ValueError):
        return CheckpointSummary(problem="its `created_at` is no time", refers=refers)
    problem = absent_of(manifest, folders)
    return CheckpointSummary(
        manifest.created_at, manifest.metrics, problem, manifest.protects, refers
    )


def contents_in_trash(
    store: Store, trash: Mapping[CheckpointId, TrashedManifest]
) -> dict[CheckpointId, CheckpointSummary]:
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
            found[checkpoint] = CheckpointSummary(problem=error.message, refers=None)
            continue
        refers = frozenset(one.name for one in manifest.files if one.origin)
        found[checkpoint] = CheckpointSummary(manifest.created_at, refers=refers)
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


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """A repository as it was when a plan was made.

    Attributes:
        plan: what goes and what stays.
        folders: sizes in bytes by file name of each checkpoint folder, committed or not.
        tags: names of all tags; a plan holds only as long as they do. None if nobody looked,
            for nothing goes.
        needed: what the checkpoints that stay need in the folders of others.
        later: the same once the time of what goes into the trash is over.
        trash: what is in the trash already, whether or not its time is over.
        over: what of that is freed now.
        into: under which name the manifests of what goes are put in the trash; empty if all of
            it is deleted at once.
    """

    plan: RotationPlan
    folders: Folders
    tags: tuple[str, ...] | None = None
    needed: ReferencedFiles = field(default_factory=ReferencedFiles)
    later: ReferencedFiles = field(default_factory=ReferencedFiles)
    trash: Mapping[CheckpointId, TrashedManifest] = field(default_factory=dict)
    over: frozenset[CheckpointId] = frozenset()
    into: str = ""

    def size_bytes(self, checkpoints: Iterable[CheckpointId]) -> int:
        """Return the bytes that the folders of ``checkpoints`` take."""
        return sum(sum(self.folders[one].values()) for one in checkpoints if one in self.folders)

    @property
    def freed_bytes(self) -> int:
        """Bytes that are free once the plan is carried out."""
        doomed = () if self.into else self.plan.doomed
        manifests = sum(self.folders[one][MANIFEST] for one in doomed)
        return manifests + sum(self.folders[one][name] for one, name in self.unneeded())

    @property
    def later_bytes(self) -> int:
        """Bytes of what goes into the trash, that are free once its time there is over."""
        doomed = self.plan.doomed if self.into else ()
        return self.size_bytes(doomed) - sum(map(self.still_needed_bytes, doomed))

    def still_needed_bytes(self, checkpoint: CheckpointId) -> int:
        """Return the bytes of files in a folder that others need, so that they stay without it."""
        files, needed = self.folders.get(checkpoint, {}), self.later if self.into else self.needed
        return sum(
            size_bytes
            for name, size_bytes in files.items()
            if name != MANIFEST and needed.holds(checkpoint, name)
        )

    def unneeded(self) -> list[tuple[CheckpointId, str]]:
        """Return the files that nobody needs once the manifests of what goes are gone."""
        return [(one, name) for one, name in self.stale() if not self.needed.holds(one, name)]

    def stale(self) -> list[tuple[CheckpointId, str]]:
        """Return the files in folders of what goes, and in those that have no manifest.

        Of the latter only those older than the newest commit: a save in flight is newer than
        it. Files that are not named as ours are not among them, nor is what stays in the trash.
        """
        if self.plan.held:
            return []
        goes = self.over if self.into else self.over.union(self.plan.doomed)
        newest = max(
            (one for one, names in self.folders.items() if MANIFEST in names), default=None
        )
        return [
            (one, name)
            for one, names in self.folders.items()
            if one in goes
            or (newest and one < newest and MANIFEST not in names and one not in self.trash)
            for name in sorted(names)
            if name != MANIFEST
        ]
