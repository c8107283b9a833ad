"""Garbage collection of old checkpoints: scan, plan as a pure function, and deletion.

Garbage collection runs after a commit. Garbage collection deletes the manifests (tables of
contents) of all selected checkpoints before any other file, so no reader finds a half-deleted
checkpoint. A checkpoint may reference files of older checkpoints. A file that a remaining
checkpoint references stays. A later collection deletes this file when no checkpoint needs the file
any more. Checkpoints in the trash (:mod:`resilient.checkpoint.trash`) stay until their grace period
is over.

A scan reads one listing of the checkpoints and one listing of the attempts (generations). The scan
also reads the record of each attempt in the line of descent, from which resume selects a
checkpoint. The scan reads the tags and each remaining manifest only if the plan would delete a
checkpoint.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import folders_of, lineage, trash_of
from resilient.checkpoint.generations import check_fence, list_numbers, read_generation
from resilient.checkpoint.reflog import pinned_for_undo
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
from resilient.clock import SystemClock
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.keys import MANIFEST, parse_trash, split_checkpoint_key
from resilient.storage.posix import fsync_leftovers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from resilient.checkpoint.repository_scan import Folders
    from resilient.checkpoint.retention import CheckpointSummary, Retention
    from resilient.checkpoint.trash import TrashPolicy
    from resilient.clock import Clock
    from resilient.format.keys import CheckpointId
    from resilient.storage.store import Store

FENCE_SECONDS = 5.0
"""Age of a fence check after which a process checks again before its next delete."""


def collect_garbage(  # noqa: PLR0913 - a collection depends on all of these
    store: Store,
    retention: Retention,
    generation: int,
    keep: Collection[CheckpointId] = (),
    *,
    written: CheckpointId | None = None,
    sweeps: bool = False,
    grace: TrashPolicy | None = None,
    token: str = "",
) -> RotationPlan:
    """Delete the checkpoints that the retention does not keep; return the executed plan.

    Only the newest attempt deletes, because it may have begun from a checkpoint that an older
    attempt would delete. Only the newest save deletes, because a suspended process does not know
    which checkpoints were protected meanwhile.

    Crash: each checkpoint is complete, or has no manifest and so does not exist. The next garbage
        collection sweeps leftover files.

    Args:
        store: Repository.
        retention: Policies.
        generation: Generation number of this attempt.
        keep: Checkpoints that the run itself protects, such as the best checkpoint.
        written: Checkpoint that this process has just committed with all receipts. It counts as
            verified unless the retention requires more.
        sweeps: Delete leftovers of killed saves even without any policy; once per attempt is
            enough.
        grace: Trash policy, which decides which checkpoints in the trash have expired; None for no
            trash.
        token: Token of this attempt's claim; empty compares the number alone.

    Raises:
        Fenced: Another claim replaced this claim; nothing more was deleted.
        StoreError: A delete failed; committed checkpoints stay committed.
    """
    if retention.is_empty and not sweeps:
        return RotationPlan((), {})
    scan = scan_and_plan(store, retention, keep, written=written, grace=grace)
    if written is not None and _has_newer_commit(written, scan.folders):
        return RotationPlan((), {})
    plan = apply_plan(store, scan, generation, token)
    return RotationPlan((), {}) if retention.is_empty else plan


def _has_newer_commit(written: CheckpointId, folders: Folders) -> bool:
    """Return whether the generation of a checkpoint has committed a later one."""
    return any(
        checkpoint > written and checkpoint.generation == written.generation and MANIFEST in names
        for checkpoint, names in folders.items()
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
        store: Repository.
        retention: Policies.
        keep: Checkpoints that the run protects; None for the protected checkpoints of the newest
            manifest.
        written: As in ``collect_garbage``.
        in_full: Read tags and verify the newest even if nothing would be deleted, so that the plan
            has every reason.
        grace: Trash policy with the grace period. None: delete at once and ignore the trash.

    Raises:
        StoreError: The store failed, so the result is unknown.
    """
    folders = folders_of(store)
    generations = list_numbers(store)
    descent = lineage(store, folders, generations)
    if keep is None:
        keep = _protected(store, descent.candidates, folders)
    state = RetentionInput(
        descent.candidates, descent.abandoned, keep=keep, separate=descent.separate
    )
    if retention.needs_contents:
        state = replace(state, contents=contents_of(store, state.everything, folders))
        state = _without(state, set(state.everything) - set(state.contents))
    plan = plan_rotation(retention, state)
    if not (plan.doomed or in_full):
        return _with_needs(store, _scan_of_plan(plan, folders, None, grace), state.contents)
    evidence = _Evidence(store, retention, folders, written)
    state = evidence.verify_best(state)
    tags = list_tags(store)
    pins, pins_problem = _pins(store, tags)
    parent_pins, parent_problem = _pin_parent_of_unsaved(store, generations, state)
    reason = pins_problem or parent_problem or evidence.doubt_newest(state)
    undo_pins = pinned_for_undo(store, state.abandoned, retention.rolled_back)
    state = replace(state, pinned=_merged(pins, parent_pins, undo_pins), held=reason)
    scan = _scan_of_plan(plan_rotation(retention, state), folders, tags, grace)
    return _with_needs(store, scan, {**evidence.read_summaries, **state.contents})


def _scan_of_plan(
    plan: RotationPlan, folders: Folders, tags: tuple[str, ...] | None, grace: TrashPolicy | None
) -> RepositoryScan:
    trash = trash_of(folders)
    if grace is None:
        return RepositoryScan(plan, folders, tags, trash=trash)
    expired_checkpoints = frozenset(grace.over(trash))
    return RepositoryScan(
        plan, folders, tags, trash=trash, over=expired_checkpoints, into=grace.name()
    )


def _with_needs(
    store: Store, scan: RepositoryScan, contents: Mapping[CheckpointId, CheckpointSummary]
) -> RepositoryScan:
    """Read the references of remaining manifests into the folders from which files would go."""
    if scan.into:
        after_grace_period = _with_needs(store, replace(scan, into=""), contents)
        scan = replace(scan, later=after_grace_period.needed)
    stale = scan.stale()
    if not stale:
        return scan
    oldest = min(checkpoint for checkpoint, _ in stale)
    staying = [
        checkpoint
        for checkpoint, names in scan.folders.items()
        if MANIFEST in names
        and (scan.into or checkpoint not in scan.plan.doomed)
        and checkpoint > oldest
    ]
    in_trash = {
        checkpoint: mark for checkpoint, mark in scan.trash.items() if checkpoint not in scan.over
    }
    contents = {**contents, **contents_in_trash(store, in_trash)}
    references = needed_by(store, [*staying, *in_trash], contents, scan.folders)
    if references.unknown is None:
        return replace(scan, needed=references)
    doubt = f"the dedup references of {references.unknown} are unknown: {references.why}"
    return replace(scan, needed=references, plan=replace(scan.plan, unsure=doubt))


def apply_plan(
    store: Store,
    scan: RepositoryScan,
    generation: int,
    token: str = "",
    clock: Clock | None = None,
) -> RotationPlan:
    """Delete the manifests that the plan lists, then all files that no checkpoint needs.

    With the trash, only the manifest moves there, because all files of its checkpoint are still
    needed.

    Before each manifest the fence and the tags are checked again, because a newer generation or
    another tag invalidates the plan. The fence is checked again before the files of each folder,
    because the repository may be restored from a backup while this process sleeps. Within a folder
    the check is repeated after ``FENCE_SECONDS``. A generation that begins later does not find
    these manifests, so it cannot reference their files.

    Crash: as in ``collect_garbage``.

    Args:
        store: Repository.
        scan: State of the repository, with the plan.
        generation: Generation number of this attempt.
        token: Token of its claim; empty compares the number alone.
        clock: Source of the age of a fence check; the machine's own clock by default.

    Returns:
        The executed part of the plan: the whole plan, unless tags changed.

    Raises:
        Fenced: Another claim replaced this claim; nothing more was deleted.
        StoreError: A delete failed; committed checkpoints stay committed.
    """
    plan, fence = scan.plan, _Fence(store, generation, token, clock or SystemClock())
    fsync_leftovers(store)
    for deleted_count, checkpoint in enumerate(plan.doomed):
        fence.check()
        if list_tags(store) != scan.tags:
            # Checkpoints that stay now may need files of deleted ones. The next run deletes the
            # rest.
            return replace(plan, doomed=plan.doomed[:deleted_count], held="tags changed meanwhile")
        if scan.into:
            put_in_trash(store, checkpoint, scan.into)
        store.delete(checkpoint.manifest_key)
    unneeded_files = scan.unneeded()
    restored_checkpoint = empty_expired_trash(store, scan.over, unneeded_files, fence.check)
    if restored_checkpoint:
        # The restored checkpoint may need any files of deleted ones. The next run deletes the rest.
        return replace(plan, unsure=f"{restored_checkpoint} was restored from the trash meanwhile")
    files = [(checkpoint, name) for checkpoint, name in unneeded_files if parse_trash(name) is None]
    for checkpoint, names in groupby(files, itemgetter(0)):
        fence.check()
        for _, name in names:
            fence.check_if_old()
            store.delete(checkpoint.key(name))
    return plan


@dataclass(slots=True)
class _Fence:
    """Fence of a process that deletes, and the age of its last check."""

    store: Store
    generation: int
    token: str
    clock: Clock
    checked_seconds: float = 0.0

    def check(self) -> None:
        """Refuse a process whose claim is not the newest."""
        check_fence(self.store, self.generation, self.token)
        self.checked_seconds = self.clock.monotonic_seconds()

    def check_if_old(self) -> None:
        """Check again if the process may have slept since the last check."""
        if self.clock.monotonic_seconds() - self.checked_seconds > FENCE_SECONDS:
            self.check()


def discard_uncommitted(store: Store, checkpoint: CheckpointId, token: str = "") -> None:
    """Delete the files of a save, unless its manifest exists and the save is therefore committed.

    Crash: the checkpoint did not exist before and does not after; a later collection deletes the
    rest.

    Args:
        store: Repository.
        checkpoint: Checkpoint that was being saved.
        token: Token of the claim that saved; empty skips the fence.

    Raises:
        Fenced: Another claim has the same number, so the files may be its own.
        StoreError: A delete failed, or it is unknown whether a manifest exists; the leftover files
            are harmless.
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
    """Results of verifying checkpoints before a deletion.

    Attributes:
        findings: Problem of each checkpoint that was read in full; empty for an intact checkpoint.
        read_summaries: Summaries of manifests that were read here.
    """

    store: Store
    retention: Retention
    folders: Folders
    written: CheckpointId | None
    findings: dict[CheckpointId, str] = field(default_factory=dict)
    read_summaries: dict[CheckpointId, CheckpointSummary] = field(default_factory=dict)

    def doubt_newest(self, state: RetentionInput) -> str:
        """Return why the newest checkpoint does not allow a deletion; empty if it does."""
        if not state.line:
            return "resume would find no usable checkpoint"
        newest, level = state.line[0], self.retention.verify_before_rotate
        if level == "written" and newest == self.written:
            return ""
        content = state.contents.get(newest) or content_of(self.store, newest, self.folders)
        problem = content.problem if content else "its manifest was deleted"
        if content:
            self.read_summaries[newest] = content
        if not problem and level == "full":
            problem = self._read_in_full(newest)
        return f"the newest, {newest}, is not verified: {problem}" if problem else ""

    def verify_best(self, state: RetentionInput) -> RetentionInput:
        """If required, read the best checkpoints in full until all counted ones are intact."""
        if self.retention.verify_before_rotate != "full":
            return state
        while True:
            best = {
                checkpoint
                for policy in self.retention.keep_best
                for checkpoint in best_by(policy, state)
            }
            unread_checkpoints = best - set(self.findings)
            if not unread_checkpoints:
                return state
            contents = dict(state.contents)
            for checkpoint in unread_checkpoints:
                contents[checkpoint] = replace(
                    contents[checkpoint], problem=self._read_in_full(checkpoint)
                )
            state = replace(state, contents=contents)

    def _read_in_full(self, checkpoint: CheckpointId) -> str:
        if checkpoint not in self.findings:
            try:
                findings = verify(self.store, checkpoint, "full")
            except KeyNotFound as error:
                self.findings[checkpoint] = error.message
            else:
                damage_findings = [finding for finding in findings if finding.severity == "damaged"]
                self.findings[checkpoint] = (
                    f"{damage_findings[0].file} {damage_findings[0].problem}"
                    if damage_findings
                    else ""
                )
        return self.findings[checkpoint]


def _protected(
    store: Store, line: Sequence[CheckpointId], folders: Folders
) -> tuple[CheckpointId, ...]:
    content = content_of(store, line[0], folders) if line else None
    return content.protects if content else ()


def _without(state: RetentionInput, removed: Collection[CheckpointId]) -> RetentionInput:
    """Drop checkpoints that another process has deleted meanwhile."""
    return replace(
        state,
        line=[checkpoint for checkpoint in state.line if checkpoint not in removed],
        abandoned=[checkpoint for checkpoint in state.abandoned if checkpoint not in removed],
    )


def _pins(store: Store, names: tuple[str, ...]) -> tuple[dict[CheckpointId, list[str]], str]:
    """Return the tagged checkpoints, and the reason to delete nothing if a tag is unreadable."""
    pins: dict[CheckpointId, list[str]] = {}
    try:
        tags = read_tags(store) if names else []
    except IntegrityError as error:
        return {}, f"a tag cannot be read: {error.message}"
    for tag in tags:
        pins.setdefault(tag.checkpoint, []).append(f"tagged `{tag.name}`")
    return pins, ""


def _pin_parent_of_unsaved(
    store: Store, generations: list[int], state: RetentionInput
) -> tuple[dict[CheckpointId, list[str]], str]:
    """Return the parent of the newest generation, while that generation has no commit."""
    newest = max(generations, default=0)
    if not newest or any(checkpoint.generation >= newest for checkpoint in state.everything):
        return {}, ""
    try:
        parent = read_generation(store, newest).parent
    except (IntegrityError, KeyNotFound) as error:
        return {}, f"the start of generation {newest} is unknown: {error.message}"
    began_from = f"generation {newest} started from it and has saved nothing yet"
    return ({parent: [began_from]} if parent else {}), ""


def _merged(*pins: Mapping[CheckpointId, list[str]]) -> dict[CheckpointId, list[str]]:
    return {
        checkpoint: [reason for pin_set in pins for reason in pin_set.get(checkpoint, ())]
        for checkpoint in set().union(*pins)
    }
