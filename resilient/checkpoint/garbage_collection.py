"""Forget old checkpoints: look, decide (pure), then act, from the top.

Rotation comes after a commit and counts manifests. All manifests that go are deleted before any
file is, so a half-deleted checkpoint is one that does not exist. A file that a checkpoint which
stays refers to is left where it is; a later rotation takes it when nobody needs it any more. What
is in the trash (:mod:`resilient.checkpoint.trash`) stays until its time there is over.

A look costs one listing of the checkpoints, one of the lives, and the record of each life in the
line of descent; tags, and each manifest that stays once, only when something would go.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import folders_of, lineage, trash_of
from resilient.checkpoint.generations import check_fence, list_numbers, read_generation
from resilient.checkpoint.reflog import held_for_undo
from resilient.checkpoint.refs import list_tags, read_tags
from resilient.checkpoint.repository_scan import (
    RepositoryScan,
    content_of,
    contents_in_trash,
    contents_of,
    needed_by,
)
from resilient.checkpoint.retention import RetentionInput, RotationPlan, best_by, plan_rotation
from resilient.checkpoint.trash import empty_expired_trash, put_in_trash
from resilient.checkpoint.verify import verify
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.keys import MANIFEST, parse_trash, split_checkpoint_key
from resilient.storage.posix import fsync_leftovers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from resilient.checkpoint.repository_scan import Folders
    from resilient.checkpoint.retention import CheckpointSummary, Retention
    from resilient.checkpoint.trash import TrashPolicy
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store


def collect_garbage(  # noqa: PLR0913 - what a rotation must be told, time included
    store: Store,
    retention: Retention,
    mine: int,
    keep: Collection[CheckpointId] = (),
    *,
    written: CheckpointId | None = None,
    sweeps: bool = False,
    grace: TrashPolicy | None = None,
    token: str = "",
) -> RotationPlan:
    """Delete what the retention does not keep; return the plan that was carried out.

    Only the newest life rotates: the checkpoint that an older one would let go may be the one
    that a newer life began from. And only the newest save: whoever comes late, for it slept, knows
    not what was protected since.

    Crash: each checkpoint is whole, or without a manifest and so not there. Leftover files are
    swept by the next rotation.

    Args:
        store: the repository.
        retention: the policies.
        mine: the number of this life.
        keep: what the run itself protects, for example its best.
        written: the checkpoint that this process has just committed with all receipts; that is
            proof enough of it unless the retention asks for more.
        sweeps: also without any policy delete what killed saves left: once in a life is enough.
        grace: tells for what in the trash the time is over; None: for nothing.
        token: token of this life's claim; empty compares the number alone.

    Raises:
        Fenced: another claim replaced this one; nothing more was deleted.
        StoreError: a delete failed; what is committed stays committed.
    """
    if retention.is_empty and not sweeps:
        return RotationPlan((), {})
    found = scan_and_plan(store, retention, keep, written=written, grace=grace)
    if written is not None and _is_outrun(written, found.folders):
        return RotationPlan((), {})
    plan = apply_plan(store, found, mine, token)
    return RotationPlan((), {}) if retention.is_empty else plan


def _is_outrun(written: CheckpointId, folders: Folders) -> bool:
    """Say whether the life of a checkpoint has committed a later one."""
    return any(
        one > written and one.generation == written.generation and MANIFEST in names
        for one, names in folders.items()
    )


def scan_and_plan(
    store: Store,
    retention: Retention,
    keep: Collection[CheckpointId] | None = None,
    *,
    written: CheckpointId | None = None,
    in_full: bool = False,
    grace: TrashPolicy | None = None,
) -> RepositoryScan:
    """Return what the retention would do to the repository.

    Crash: reads only.

    Args:
        store: the repository.
        retention: the policies.
        keep: what the run itself protects; None: what the newest manifest says it protects.
        written: as in ``rotate``.
        in_full: read tags and prove the newest even if nothing goes, so that every reason is
            among the plan's.
        grace: for how long what goes is put in the trash, and for what there the time is over;
            None: what goes is deleted at once, and what is in the trash stays.

    Raises:
        StoreError: the store failed; nothing is concluded from silence.
    """
    folders = folders_of(store)
    lives = list_numbers(store)
    descent = lineage(store, folders, lives)
    if keep is None:
        keep = _protected(store, descent.candidates, folders)
    known = RetentionInput(
        descent.candidates, descent.abandoned, keep=keep, separate=descent.separate
    )
    if retention.needs_contents:
        known = replace(known, contents=contents_of(store, known.everything, folders))
        known = _without(known, set(known.everything) - set(known.contents))
    plan = plan_rotation(retention, known)
    if not (plan.doomed or in_full):
        return _with_needs(store, _found(plan, folders, None, grace), known.contents)
    desk = _Evidence(store, retention, folders, written)
    known = desk.prove_best(known)
    tags = list_tags(store)
    pins, trouble = _pins(store, tags)
    own, unsure = _unsaved_life(store, lives, known)
    held = trouble or unsure or desk.doubt_newest(known)
    left = held_for_undo(store, known.abandoned, retention.rolled_back)
    known = replace(known, pinned=_joined(pins, own, left), held=held)
    found = _found(plan_rotation(retention, known), folders, tags, grace)
    return _with_needs(store, found, {**desk.seen, **known.contents})


def _found(
    plan: RotationPlan, folders: Folders, tags: tuple[str, ...] | None, grace: TrashPolicy | None
) -> RepositoryScan:
    trash = trash_of(folders)
    if grace is None:
        return RepositoryScan(plan, folders, tags, trash=trash)
    over = frozenset(grace.over(trash))
    return RepositoryScan(plan, folders, tags, trash=trash, over=over, into=grace.name())


def _with_needs(
    store: Store, found: RepositoryScan, contents: Mapping[CheckpointId, CheckpointSummary]
) -> RepositoryScan:
    """Read what the manifests that stay need of the folders from which files would go."""
    if found.into:
        once_over = _with_needs(store, replace(found, into=""), contents)
        found = replace(found, later=once_over.needed)
    stale = found.stale()
    if not stale:
        return found
    oldest = min(one for one, _ in stale)
    staying = [
        one
        for one, names in found.folders.items()
        if MANIFEST in names and (found.into or one not in found.plan.doomed) and one > oldest
    ]
    held = {one: mark for one, mark in found.trash.items() if one not in found.over}
    contents = {**contents, **contents_in_trash(store, held)}
    needed = needed_by(store, [*staying, *held], contents, found.folders)
    if needed.unknown is None:
        return replace(found, needed=needed)
    unsure = f"it is unknown what {needed.unknown} refers to: {needed.why}"
    return replace(found, needed=needed, plan=replace(found.plan, unsure=unsure))


def apply_plan(store: Store, found: RepositoryScan, mine: int, token: str = "") -> RotationPlan:
    """Delete the manifests of what the plan dooms, then all files that nobody needs any more.

    Into the trash goes a manifest alone: all files of its checkpoint are needed then.

    Before each manifest it looks again whether a newer life or another tag has come, because
    then the plan does not hold any more. And again before the files: a life that begins later
    finds the manifests gone, so it cannot refer to what they named.

    Crash: as in ``rotate``.

    Returns:
        The plan as far as it was carried out: all of it, unless tags changed.

    Raises:
        Fenced: another claim replaced this one; nothing more was deleted.
        StoreError: a delete failed; what is committed stays committed.
    """
    plan = found.plan
    fsync_leftovers(store)
    for done, checkpoint in enumerate(plan.doomed):
        check_fence(store, mine, token)
        if list_tags(store) != found.tags:
            # What stays now may need files of what went: the next rotation knows.
            return replace(plan, doomed=plan.doomed[:done], held="tags changed meanwhile")
        if found.into:
            put_in_trash(store, checkpoint, found.into)
        store.delete(checkpoint.manifest_key)
    unneeded = found.unneeded()
    if unneeded:
        check_fence(store, mine, token)
    back = empty_expired_trash(store, found.over, unneeded)
    if back:
        # It may need files of what went, wherever they lie: the next rotation knows.
        return replace(plan, unsure=f"{back} was brought back from the trash meanwhile")
    for checkpoint, name in unneeded:
        if parse_trash(name) is None:
            store.delete(checkpoint.key(name))
    return plan


def discard_uncommitted(store: Store, checkpoint: CheckpointId, token: str = "") -> None:
    """Delete the files of a save, unless its manifest is there: then it is committed.

    Crash: it did not exist before and does not after; the rest is swept later.

    Args:
        store: the repository.
        checkpoint: what was being saved.
        token: token of the claim that saved; empty looks at no fence.

    Raises:
        Fenced: another claim has the same number, so the files may be its own.
        StoreError: a delete failed, or nobody can say whether there is a manifest; the
            leftovers do no harm.
    """
    with suppress(KeyNotFound):
        store.stat(checkpoint.manifest_key)
        return
    if token:
        check_fence(store, checkpoint.generation, token)
    for entry in list(store.list(f"{checkpoint.folder}/")):
        split = split_checkpoint_key(entry.key)
        if split and split[1] != MANIFEST:
            store.delete(entry.key)


@dataclass(slots=True)
class _Evidence:
    """How far checkpoints are trusted, and what looking closer has shown.

    Attributes:
        findings: the problem of each that was read in full; empty for a whole one.
        seen: what was read here of manifests.
    """

    store: Store
    retention: Retention
    folders: Folders
    written: CheckpointId | None
    findings: dict[CheckpointId, str] = field(default_factory=dict)
    seen: dict[CheckpointId, CheckpointSummary] = field(default_factory=dict)

    def doubt_newest(self, known: RetentionInput) -> str:
        """Return why the newest is not good enough to let older ones go; empty if it is."""
        if not known.line:
            return "resume would find nothing that it may use"
        newest, level = known.line[0], self.retention.verify_before_rotate
        if level == "written" and newest == self.written:
            return ""
        content = known.contents.get(newest) or content_of(self.store, newest, self.folders)
        problem = content.problem if content else "its manifest is gone"
        if content:
            self.seen[newest] = content
        if not problem and level == "full":
            problem = self._read_in_full(newest)
        return f"the newest, {newest}, is not verified: {problem}" if problem else ""

    def prove_best(self, known: RetentionInput) -> RetentionInput:
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
                hurt = [one for one in wrong if one.severity == "damaged"]
                self.findings[checkpoint] = f"{hurt[0].file} {hurt[0].problem}" if hurt else ""
        return self.findings[checkpoint]


def _protected(
    store: Store, line: Sequence[CheckpointId], folders: Folders
) -> tuple[CheckpointId, ...]:
    content = content_of(store, line[0], folders) if line else None
    return content.protects if content else ()


def _without(known: RetentionInput, gone: Collection[CheckpointId]) -> RetentionInput:
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
    store: Store, lives: list[int], known: RetentionInput
) -> tuple[dict[CheckpointId, list[str]], str]:
    """Return where the newest life began, as long as it has no commit of its own."""
    newest = max(lives, default=0)
    if not newest or any(one.generation >= newest for one in known.everything):
        return {}, ""
    try:
        parent = read_generation(store, newest).parent
    except (IntegrityError, KeyNotFound) as error:
        return {}, f"it is unknown where life {newest} began: {error.message}"
    began_from = f"life {newest} began from it and has saved nothing yet"
    return ({parent: [began_from]} if parent else {}), ""


def _joined(*pins: Mapping[CheckpointId, list[str]]) -> dict[CheckpointId, list[str]]:
    return {one: [why for some in pins for why in some.get(one, ())] for one in set().union(*pins)}
