"""Scan of a repository: its content, and the files that no checkpoint needs.

A checkpoint may need files of older checkpoints (:mod:`resilient.checkpoint.save.dedup`), so a file
is deleted only when no remaining manifest (table of contents) needs the file. An unreadable
manifest may reference any file of an older checkpoint. In this case, no file of an older checkpoint
is deleted.
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
    """Files that the remaining checkpoints need in folders of other checkpoints.

    Attributes:
        keys: Keys of the files.
        unknown: Newest remaining checkpoint whose references are unknown; None if all are known.
        why: Problem of its manifest.
    """

    keys: frozenset[str] = frozenset()
    unknown: CheckpointId | None = None
    why: str = ""

    def holds(self, checkpoint: CheckpointId, name: str) -> bool:
        """Return whether a file must stay although the checkpoint that wrote it is deleted."""
        if self.unknown is not None and checkpoint < self.unknown:
            return True
        return checkpoint.key(name) in self.keys


def needed_by(
    store: Store,
    staying: Iterable[CheckpointId],
    contents: Mapping[CheckpointId, CheckpointSummary],
    folders: Folders,
) -> ReferencedFiles:
    """Return the files that the checkpoints ``staying`` need; one deleted meanwhile needs none.

    Crash: reads only.

    Args:
        store: Repository.
        staying: Checkpoints whose manifests stay.
        contents: Summaries of manifests that were read already.
        folders: Listing of the folders.

    Raises:
        StoreError: The store failed, so the needed files are unknown.
    """
    keys: set[str] = set()
    unknown_checkpoint: CheckpointId | None = None
    problem = ""
    for checkpoint in sorted(staying):
        content = contents.get(checkpoint) or content_of(store, checkpoint, folders)
        if content is None:
            continue
        if content.refers is None:
            unknown_checkpoint, problem = checkpoint, content.problem
        else:
            keys |= content.refers
    return ReferencedFiles(frozenset(keys), unknown_checkpoint, problem)


def contents_of(
    store: Store, checkpoints: Iterable[CheckpointId], folders: Folders
) -> dict[CheckpointId, CheckpointSummary]:
    """Return the summaries of manifests, without manifests that were deleted meanwhile.

    Crash: reads only.
    """
    contents = {checkpoint: content_of(store, checkpoint, folders) for checkpoint in checkpoints}
    return {checkpoint: content for checkpoint, content in contents.items() if content is not None}


def content_of(
    store: Store, checkpoint: CheckpointId, folders: Folders
) -> CheckpointSummary | None:
    """Read one manifest and compare it with the listing, which costs no further request.

    Crash: reads only.
    """
    try:
        manifest = read_manifest(store, checkpoint)
    except KeyNotFound:
        return None
    except (IntegrityError, IncompatibleCheckpoint) as error:
        return CheckpointSummary(problem=error.message, refers=None)
    refers = frozenset(file.name for file in manifest.files if file.origin)
    try:
        datetime.fromisoformat(manifest.created_at)
    except (TypeError, ValueError):
        return CheckpointSummary(problem="its `created_at` is not a time", refers=refers)
    problem = absent_of(manifest, folders)
    return CheckpointSummary(
        manifest.created_at, manifest.metrics, problem, manifest.protects, refers
    )


def contents_in_trash(
    store: Store, trash: Mapping[CheckpointId, TrashedManifest]
) -> dict[CheckpointId, CheckpointSummary]:
    """Return the references of manifests in the trash; restored ones are left out.

    Crash: reads only.
    """
    contents = {}
    for checkpoint, mark in trash.items():
        try:
            manifest = read_in_trash(store, checkpoint, mark)
        except KeyNotFound:
            continue
        except (IntegrityError, IncompatibleCheckpoint) as error:
            contents[checkpoint] = CheckpointSummary(problem=error.message, refers=None)
            continue
        refers = frozenset(file.name for file in manifest.files if file.origin)
        contents[checkpoint] = CheckpointSummary(manifest.created_at, refers=refers)
    return contents


def absent_of(manifest: Manifest, folders: Folders) -> str:
    """Describe the first file that a restore needs and the listing lacks; empty for none.

    Missing parity files do not count.
    """
    size_problem, needed_names = "", manifest.needed
    for file in manifest.files:
        if file.name not in needed_names:
            continue
        split = split_checkpoint_key(manifest.key(file.name))
        size_bytes = folders.get(split[0], {}).get(split[1]) if split else None
        if size_bytes is None:
            return f"{file.name} is missing"
        if size_bytes != file.size_bytes:
            size_problem = size_problem or f"{file.name} has another size"
    return size_problem


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """State of a repository when a plan was made.

    Attributes:
        plan: Checkpoints to delete and to keep.
        folders: Sizes in bytes by file name of each checkpoint folder, committed or not.
        tags: Names of all tags; the plan is valid only while they are unchanged. None if they were
            not read, because nothing would be deleted.
        needed: Files in folders of others that the remaining checkpoints need.
        later: The needed files after the grace period of the checkpoints that now go into the
            trash.
        trash: Checkpoints in the trash, expired or not.
        over: Checkpoints in the trash to delete now.
        into: Name for manifests that go into the trash; empty to delete at once.
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
        """Return the bytes in the folders of ``checkpoints``."""
        return sum(
            sum(self.folders[checkpoint].values())
            for checkpoint in checkpoints
            if checkpoint in self.folders
        )

    @property
    def freed_bytes(self) -> int:
        """Bytes that the plan frees."""
        doomed_checkpoints = () if self.into else self.plan.doomed
        manifests = sum(self.folders[checkpoint][MANIFEST] for checkpoint in doomed_checkpoints)
        return manifests + sum(
            self.folders[checkpoint][name] for checkpoint, name in self.unneeded()
        )

    @property
    def later_bytes(self) -> int:
        """Bytes that the plan frees once the grace period in the trash is over."""
        doomed_checkpoints = self.plan.doomed if self.into else ()
        return self.size_bytes(doomed_checkpoints) - sum(
            map(self.still_needed_bytes, doomed_checkpoints)
        )

    def still_needed_bytes(self, checkpoint: CheckpointId) -> int:
        """Return the bytes of files in a folder that stay because other checkpoints need them."""
        files, references = (
            self.folders.get(checkpoint, {}),
            self.later if self.into else self.needed,
        )
        return sum(
            size_bytes
            for name, size_bytes in files.items()
            if name != MANIFEST and references.holds(checkpoint, name)
        )

    def unneeded(self) -> list[tuple[CheckpointId, str]]:
        """Return the files that no checkpoint needs once these manifests are deleted."""
        return [
            (checkpoint, name)
            for checkpoint, name in self.stale()
            if not self.needed.holds(checkpoint, name)
        ]

    def stale(self) -> list[tuple[CheckpointId, str]]:
        """Return the files in folders to delete, and in folders without a manifest.

        Folders without a manifest count only if they are older than the newest commit, because a
        save in flight is newer. Files with foreign names and checkpoints that stay in the trash are
        not included.
        """
        if self.plan.held:
            return []
        deleted_checkpoints = self.over if self.into else self.over.union(self.plan.doomed)
        newest = max(
            (checkpoint for checkpoint, names in self.folders.items() if MANIFEST in names),
            default=None,
        )
        return [
            (checkpoint, name)
            for checkpoint, names in self.folders.items()
            if checkpoint in deleted_checkpoints
            or (
                newest
                and checkpoint < newest
                and MANIFEST not in names
                and checkpoint not in self.trash
            )
            for name in sorted(names)
            if name != MANIFEST
        ]
