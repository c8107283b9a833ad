"""A repository as a rotation found it, and which files nobody will need. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.format.names import MANIFEST
from resilient.vault.rotation.contents import Needed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.names import CheckpointId, Trashed
    from resilient.vault.registry.planning import RotationPlan
    from resilient.vault.rotation.contents import Folders


@dataclass(frozen=True, slots=True)
class Found:
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
    needed: Needed = field(default_factory=Needed)
    later: Needed = field(default_factory=Needed)
    trash: Mapping[CheckpointId, Trashed] = field(default_factory=dict)
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
