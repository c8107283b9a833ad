"""Forget old checkpoints: look, decide (pure), then act, from the top.

Rotation comes after a commit and counts manifests. A manifest is deleted before the files that
it names, so a half-deleted checkpoint is one that does not exist.

What a look costs is one listing of the checkpoints, one of the lives, and the record of each
life in the line of descent. Only when something would go are tags read, and only for a policy
that asks for their content are manifests read, each at most once.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.names import MANIFEST, split_checkpoint_key
from resilient.storage.settling import settle
from resilient.vault.catalog import folders_of, lineage, read_manifest
from resilient.vault.generations import check_fence, list_numbers, read_generation
from resilient.vault.planning import Content, Known, RotationPlan, best_by, plan_rotation
from resilient.vault.tags import list_tags, read_tags
from resilient.vault.verify import verify

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store
    from resilient.vault.retention import Retention

Folders = dict["CheckpointId", dict[str, int]]


@dataclass(frozen=True, slots=True)
class Found:
    """A repository as it was when a plan was made.

    Attributes:
        plan: what goes and what stays.
        folders: sizes in bytes by file name of each checkpoint folder, committed or not.
        tags: names of all tags; a plan holds only as long as they do. None if nobody looked,
            for nothing goes.
    """

    plan: RotationPlan
    folders: Folders
    tags: tuple[str, ...] | None = None

    def size_bytes(self, checkpoints: Iterable[CheckpointId]) -> int:
        """Return the bytes that the folders of ``checkpoints`` take."""
        return sum(sum(self.folders[one].values()) for one in checkpoints if one in self.folders)

    def leftovers(self) -> list[tuple[CheckpointId, str]]:
        """Return the files of folders without a manifest that are older than the newest commit.

        A save in flight is newer than it; files that are not named as ours are not among them.
        """
        if self.plan.held:
            return []
        newest = max(
            (one for one, names in self.folders.items() if MANIFEST in names), default=None
        )
        return [
            (one, name)
            for one, names in self.folders.items()
            if newest and one < newest and MANIFEST not in names
            for name in sorted(names)
        ]


def rotate(
    store: Store,
    retention: Retention,
    mine: int,
    keep: Collection[CheckpointId] = (),
    *,
    written: CheckpointId | None = None,
) -> RotationPlan:
    """Delete what the retention does not keep; return the plan that was carried out.

    Only the newest life rotates: the checkpoint that an older one would let go may be the one
    that a newer life began from.

    Crash: each checkpoint is whole, or without a manifest and so not there. Leftover files are
    swept by the next rotation.

    Args:
        store: the repository.
        retention: the policies.
        mine: the number of this life.
        keep: what the run itself protects, for example its best.
        written: the checkpoint that this process has just committed with all receipts; that is
            proof enough of it unless the retention asks for more.

    Raises:
        Fenced: a newer life began; nothing more was deleted.
        StoreError: a delete failed; what is committed stays committed.
    """
    if retention.is_empty:
        return RotationPlan((), {})
    found = look(store, retention, keep, written=written)
    return carry_out(store, found, mine)


def look(
    store: Store,
    retention: Retention,
    keep: Collection[CheckpointId] | None = None,
    *,
    written: CheckpointId | None = None,
    in_full: bool = False,
) -> Found:
    """Return what the retention would do to the repository.

    Crash: reads only.

    Args:
        store: the repository.
        retention: the policies.
        keep: what the run itself protects; None: what the newest manifest says it protects.
        written: as in ``rotate``.
        in_full: read tags and prove the newest even if nothing goes, so that every reason is
            among the plan's.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """
    folders = folders_of(store)
    lives = list_numbers(store)
    descent = lineage(store, folders, lives)
    if keep is None:
        keep = _protected(store, descent.candidates, folders)
    known = Known(descent.candidates, descent.abandoned, keep=keep, separate=descent.separate)
    if retention.needs_contents:
        known = replace(known, contents=_contents(store, known, folders))
        known = _without(known, set(known.everything) - set(known.contents))
    plan = plan_rotation(retention, known)
    if not (plan.doomed or in_full):
        return Found(plan, folders)
    desk = _Evidence(store, retention, folders, written)
    known = desk.prove_best(known)
    tags = list_tags(store)
    pins, trouble = _pins(store, tags)
    own, unsure = _unsaved_life(store, lives, known)
    held = trouble or unsure or desk.doubt_newest(known)
    known = replace(known, pinned=_joined(pins, own), held=held)
    return Found(plan_rotation(retention, known), folders, tags)


def carry_out(store: Store, found: Found, mine: int) -> RotationPlan:
    """Delete what the plan dooms, then what cut-short saves and rotations left behind.

    Before each checkpoint it looks again whether a newer life or another tag has come, because
    then the plan does not hold any more.

    Crash: as in ``rotate``.

    Returns:
        The plan as far as it was carried out: all of it, unless tags changed.

    Raises:
        Fenced: a newer life began; nothing more was deleted.
        StoreError: a delete failed; what is committed stays committed.
    """
    plan = found.plan
    settle(store)
    for done, checkpoint in enumerate(plan.doomed):
        check_fence(store, mine)
        if list_tags(store) != found.tags:
            plan = replace(plan, doomed=plan.doomed[:done], held="tags changed meanwhile")
            break
        store.delete(checkpoint.manifest_key)
    gone = [(one, name) for one in plan.doomed for name in sorted(found.folders[one])]
    for checkpoint, name in [*gone, *found.leftovers()]:
        if name != MANIFEST:
            store.delete(checkpoint.key(name))
    return plan


def discard(store: Store, checkpoint: CheckpointId) -> None:
    """Delete the files of a save, unless its manifest is there: then it is committed.

    Crash: it did not exist before and does not after; the rest is swept later.

    Raises:
        StoreError: a delete failed, or nobody can say whether there is a manifest; the
            leftovers do no harm.
    """
    with suppress(KeyNotFound):
        store.stat(checkpoint.manifest_key)
        return
    for entry in list(store.list(f"{checkpoint.folder}/")):
        split = split_checkpoint_key(entry.key)
        if split and split[1] != MANIFEST:
            store.delete(entry.key)


@dataclass(slots=True)
class _Evidence:
    """How far checkpoints are trusted, and what looking closer has shown.

    Attributes:
        findings: the problem of each that was read in full; empty for a whole one.
    """

    store: Store
    retention: Retention
    folders: Folders
    written: CheckpointId | None
    findings: dict[CheckpointId, str] = field(default_factory=dict)

    def doubt_newest(self, known: Known) -> str:
        """Return why the newest is not good enough to let older ones go; empty if it is."""
        if not known.line:
            return "resume would find nothing that it may use"
        newest, level = known.line[0], self.retention.verify_before_rotate
        if level == "written" and newest == self.written:
            return ""
        content = known.contents.get(newest) or _content(self.store, newest, self.folders)
        problem = content.problem if content else "its manifest is gone"
        if not problem and level == "full":
            problem = self._read_in_full(newest)
        return f"the newest, {newest}, is not verified: {problem}" if problem else ""

    def prove_best(self, known: Known) -> Known:
        """Read what would be kept as best in full, if that is wanted, until all of it is whole."""
        if self.retention.verify_before_rotate != "full":
            return known
        while True:
            best = {one for by in self.retention.keep_best for one in best_by(by, known)}
            unread = best - set(self.findings)
            if not unread:
                return known
            contents = dict(known.contents)
            for one in unread:
                contents[one] = replace(contents[one], problem=self._read_in_full(one))
            known = replace(known, contents=contents)

    def _read_in_full(self, checkpoint: CheckpointId) -> str:
        if checkpoint not in self.findings:
            try:
                wrong = verify(self.store, checkpoint, "full")
            except KeyNotFound as error:
                self.findings[checkpoint] = error.message
            else:
                self.findings[checkpoint] = f"{wrong[0].file} {wrong[0].problem}" if wrong else ""
        return self.findings[checkpoint]


def _contents(store: Store, known: Known, folders: Folders) -> dict[CheckpointId, Content]:
    """Return what the manifests say; one that is gone meanwhile is left out."""
    found = {one: _content(store, one, folders) for one in known.everything}
    return {one: content for one, content in found.items() if content is not None}


def _content(store: Store, checkpoint: CheckpointId, folders: Folders) -> Content | None:
    """Read one manifest and hold it against the listing, which costs nothing more."""
    try:
        manifest = read_manifest(store, checkpoint)
        datetime.fromisoformat(manifest.created_at)
    except KeyNotFound:
        return None
    except (IntegrityError, IncompatibleCheckpoint) as error:
        return Content(problem=error.message)
    except (TypeError, ValueError):
        return Content(problem="its `created_at` is no time")
    there = folders[checkpoint]
    missing = [one.name for one in manifest.files if one.name not in there]
    resized = [
        one.name for one in manifest.files if there.get(one.name, one.size_bytes) != one.size_bytes
    ]
    problem = f"{missing[0]} is missing" if missing else ""
    problem = problem or (f"{resized[0]} has another size" if resized else "")
    return Content(manifest.created_at, manifest.metrics, problem, manifest.protects)


def _protected(
    store: Store, line: Sequence[CheckpointId], folders: Folders
) -> tuple[CheckpointId, ...]:
    content = _content(store, line[0], folders) if line else None
    return content.protects if content else ()


def _without(known: Known, gone: Collection[CheckpointId]) -> Known:
    """Forget what another process has deleted meanwhile."""
    return replace(
        known,
        line=[one for one in known.line if one not in gone],
        abandoned=[one for one in known.abandoned if one not in gone],
    )


def _pins(store: Store, names: tuple[str, ...]) -> tuple[dict[CheckpointId, list[str]], str]:
    """Return what tags hold, and why nothing may go because one cannot be read."""
    pins: dict[CheckpointId, list[str]] = {}
    try:
        tags = read_tags(store) if names else []
    except IntegrityError as error:
        return {}, f"it is unknown what a tag holds: {error.message}"
    for tag in tags:
        pins.setdefault(tag.checkpoint, []).append(f"tagged `{tag.name}`")
    return pins, ""


def _unsaved_life(
    store: Store, lives: list[int], known: Known
) -> tuple[dict[CheckpointId, list[str]], str]:
    """Return where the newest life began, as long as it has no commit of its own."""
    newest = max(lives, default=0)
    if not newest or any(one.generation >= newest for one in known.everything):
        return {}, ""
    try:
        parent = read_generation(store, newest).parent
    except (IntegrityError, KeyNotFound) as error:
        return {}, f"it is unknown where life {newest} began: {error.message}"
    return (
        {parent: [f"life {newest} began from it and has saved nothing yet"]} if parent else {},
        "",
    )


def _joined(
    some: Mapping[CheckpointId, list[str]], more: Mapping[CheckpointId, list[str]]
) -> dict[CheckpointId, list[str]]:
    return {one: [*some.get(one, ()), *more.get(one, ())] for one in {**some, **more}}
