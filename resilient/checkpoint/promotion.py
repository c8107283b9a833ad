"""Promotion of checkpoints from the near tier to the durable tier.

The near tier is a fast local store, and the durable tier is the permanent store. The promotion
copies and verifies each file, and puts the manifest (table of contents) last. The manifest is equal
in both tiers, byte for byte. The promotion checks that no newer attempt has claimed the repository
(the fence), and then creates the manifest only if no manifest exists. The promoted checkpoint is
therefore equal to a checkpoint that was saved in the durable tier.

A newer checkpoint may be committed in the durable tier before the manifest is put. The copied files
then look like leftovers of a killed save. A garbage collection may then delete the files. The
promotion therefore checks all files again after the put of the manifest.

One thread per near tier copies its files, one checkpoint at a time. If a checkpoint is due for
promotion, its save ends only after the promotion in progress has ended. The next save then waits
too, so the durable tier lags by no more than its schedule allows. Only the coordinator (rank 0)
decides which checkpoints are due. The coordinator announces these checkpoints with the commit.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint import events as checkpoint_events
from resilient.checkpoint.commit import copy_manifest, put_manifest
from resilient.checkpoint.context import PostCommitPlan
from resilient.checkpoint.generations import check_fence
from resilient.checkpoint.promotion_policy import PromotionSchedule
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.persist import collect_garbage_after_commit
from resilient.checkpoint.tiers.tiered_store import TieredStore
from resilient.checkpoint.verified_read import fetch
from resilient.distributed.coordination import ControlGroup, RankFailure, agree, capture_failure
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import (
    ConfigError,
    Fenced,
    IntegrityError,
    KeyNotFound,
    PeerFailed,
    ResilientError,
    SaveFailed,
)
from resilient.format.digest import digest_file
from resilient.format.document import DOCUMENT_BYTES_MAX
from resilient.format.keys import parse_checkpoint, signature_name
from resilient.format.manifest import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.promotion_policy import TieringOptions
    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store


def is_committed(store: Store, checkpoint: CheckpointId) -> bool:
    """Return whether a checkpoint has a manifest in a repository.

    Crash: reads only.

    Raises:
        StoreError: The store failed, so the answer is unknown.
    """
    return _size_of(store, checkpoint.manifest_key) >= 0


@dataclass(frozen=True, slots=True)
class PromotionGroup:
    """Group of the leaders of all near tiers, who promote a checkpoint together.

    Attributes:
        comms: Control group of the leaders; the coordinator is the first.
        topic: Name of this promotion, equal on all leaders and never used before.
        within_seconds: Deadline for a leader without progress on its files.
    """

    comms: ControlGroup = field(
        default_factory=lambda: ControlGroup(InMemoryKVStore(), World(), "alone")
    )
    topic: str = "promote"
    within_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class _CopiedFiles:
    """One place's share of a checkpoint, after its copy to the durable tier.

    Attributes:
        manifest: Manifest of all places.
        data: Its bytes.
        names: Files in this near tier.
        put_bytes: Bytes that were copied because they were missing.
        is_committed: Whether the durable tier already had the manifest.
    """

    manifest: Manifest
    data: bytes
    names: list[str]
    put_bytes: int
    is_committed: bool


def promote(
    tiers: TieredStore,
    checkpoint: CheckpointId,
    generation: int,
    group: PromotionGroup | None = None,
    token: str = "",
) -> int:
    """Copy a checkpoint and its references from the near tier to the durable tier.

    Each place copies its own files. Then the coordinator puts the manifest. One file at a time is
    in memory. Then all places check again, and copy the files that a sweep deleted meanwhile. For a
    checkpoint that is already durable, they copy missing files from the near tier, if present. A
    deleted checkpoint is skipped.

    Collective: the leader of each place, same checkpoint.
    Crash: files may be there; without a manifest the checkpoint is not in the durable tier, and
        the near one is untouched.

    Args:
        tiers: Both tiers.
        checkpoint: Checkpoint that is committed in the near tier.
        generation: Generation that promotes.
        group: Group of the leaders of all places; only this leader by default.
        token: Token of the claim of that generation; empty compares the number alone.

    Returns:
        Bytes that all places copied.

    Raises:
        Fenced: Another claim replaced this claim; no manifest was put.
        IntegrityError: The near copy is damaged, or a file is missing everywhere; no manifest was
            put.
        StoreError: A tier failed; the manifest may be there, and if so it is whole.
    """
    group = group or PromotionGroup()
    fence = partial(check_fence, tiers.durable, generation, token)
    with group.comms.at_work() as heartbeat:
        copied: Any = capture_failure(lambda: _copy_files(tiers, checkpoint, fence, heartbeat))
    answers = copied
    if not isinstance(copied, RankFailure):
        answers = {"names": copied.names, "put": copied.put_bytes} if copied else None

    def rule(answers: list[Any]) -> dict[str, Any]:
        return (
            _put_manifest(tiers, copied, answers, fence) if copied else {"put": 0, "is_new": False}
        )

    ruling = _agree(group, "carried", answers, rule)
    put_bytes = int(ruling["put"])
    if ruling["is_new"]:
        # A sweep that looked before the manifest was put may have deleted files as leftovers.
        leads = group.comms.world.is_coordinator
        with group.comms.at_work() as heartbeat:
            repeat_result = capture_failure(
                lambda: _copy_again(tiers, copied, fence, heartbeat, signature=leads)
            )
        put_bytes += _agree(group, "again", repeat_result, sum)
        if leads and copied.manifest.parity:
            copy_manifest(tiers.durable, checkpoint)
    return put_bytes


def _agree(
    group: PromotionGroup, subject: str, value: Any, rule: Callable[[list[Any]], Any]
) -> Any:
    topic = f"{group.topic}/{subject}"
    return agree(group.comms, topic, value, rule, group.within_seconds)


def _copy_files(
    tiers: TieredStore,
    checkpoint: CheckpointId,
    fence: Callable[[], None],
    heartbeat: Callable[[], None],
) -> _CopiedFiles | None:
    """Copy the files in this near tier; return None if the checkpoint is gone."""
    key = checkpoint.manifest_key
    was_committed = is_committed(tiers.durable, checkpoint)
    try:
        manifest, data = fetch(
            tiers, key, lambda data: (decode(data, key), data), DOCUMENT_BYTES_MAX
        )
    except KeyNotFound:
        return None
    near_files = [
        file for file in manifest.files if _size_of(tiers.near, manifest.key(file.name)) >= 0
    ]
    put_bytes = _copy_each(tiers, manifest, near_files, fence, heartbeat)
    return _CopiedFiles(
        manifest, data, [file.name for file in near_files], put_bytes, was_committed
    )


def _copy_again(
    tiers: TieredStore,
    copied: _CopiedFiles | None,
    fence: Callable[[], None],
    heartbeat: Callable[[], None],
    *,
    signature: bool,
) -> int:
    if copied is None:
        return 0
    if signature:
        fence()
        _copy_signature(tiers, copied.manifest)
    near_files = [file for file in copied.manifest.files if file.name in copied.names]
    return _copy_each(tiers, copied.manifest, near_files, fence, heartbeat)


def _put_manifest(
    tiers: TieredStore, copied: _CopiedFiles, answers: list[Any], fence: Callable[[], None]
) -> dict[str, Any]:
    """Put the manifest if all files are durable; for the coordinator only."""
    manifest = copied.manifest
    put_bytes = sum(report["put"] for report in answers if report)
    if copied.is_committed:
        return {"put": put_bytes, "is_new": False}
    copied_names = {name for report in answers if report for name in report["names"]}
    for entry in manifest.files:
        key = manifest.key(entry.name)
        if entry.name not in copied_names and _size_of(tiers.durable, key) != entry.size_bytes:
            raise IntegrityError(f"`{key}` is missing in every near tier", key=key)
    fence()
    _copy_signature(tiers, manifest)
    put_manifest(tiers.durable, manifest.checkpoint.manifest_key, copied.data)
    return {"put": put_bytes + len(copied.data), "is_new": True}


def _copy_each(
    tiers: TieredStore,
    manifest: Manifest,
    entries: Iterable[FileEntry],
    fence: Callable[[], None],
    heartbeat: Callable[[], None],
) -> int:
    """Copy files one after the other; return the bytes copied."""
    put_bytes = 0
    for entry in entries:
        put_bytes += _copy_file(tiers, manifest, entry, fence)
        heartbeat()
    return put_bytes


def _copy_file(
    tiers: TieredStore, manifest: Manifest, entry: FileEntry, fence: Callable[[], None]
) -> int:
    """Copy one file unless it exists; return the bytes copied."""
    key = manifest.key(entry.name)
    if _size_of(tiers.durable, key) == entry.size_bytes:
        return 0

    def verified(data: bytes) -> bytes:
        if digest_file(data) != entry.proof:
            raise IntegrityError(f"`{key}` in the near tier differs from what was saved", key=key)
        return data

    data = fetch(tiers.near, key, verified, entry.size_bytes)
    fence()
    tiers.durable.put(key, data)
    return entry.size_bytes


def _copy_signature(tiers: TieredStore, manifest: Manifest) -> None:
    key = manifest.checkpoint.key(signature_name(manifest.root))
    try:
        tiers.durable.put(key, tiers.get(key))
    except KeyNotFound:
        return


def _size_of(store: Store, key: str) -> int:
    """Return an object's bytes, -1 if there is none."""
    try:
        return store.stat(key).size_bytes
    except KeyNotFound:
        return -1


class TierPromoter:
    """Promoter of checkpoints from near tiers to the durable tier, at the leader of each near tier.

    These checkpoints are always promoted: the parent of the attempt, its first save, and the
    checkpoints that the run protects (its best). The others are the checkpoints due by the
    schedule, and the last checkpoint when the run closes. After a failed promotion the next save is
    promoted. A damaged checkpoint is tried again only with the next due checkpoint, so it causes no
    extra promotions.

    Args:
        tiers: Both tiers.
        tiering: Promotion schedule, and the size of the near tier.
    """

    def __init__(self, tiers: TieredStore, tiering: TieringOptions) -> None:
        self._tiers = tiers
        self._tiering = tiering
        self._schedule = PromotionSchedule() if tiering.is_planned else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-promote")
        self._in_flight: Future[bool] | None = None
        self._pending_ids: list[CheckpointId] = []
        self._promoted: set[CheckpointId] = set()
        self._errors: dict[CheckpointId, IntegrityError] = {}
        self._newest: CheckpointId | None = None
        self._keep: tuple[CheckpointId, ...] = ()
        self._missing_manifests: list[CheckpointId] = []
        self._comms = ControlGroup(InMemoryKVStore(), World(), "promote")
        self._generation = 0
        self._saves = 0
        self._finish_count = 0
        self._began_seconds = 0.0
        self._must_promote_next = False
        self._is_marked = False
        self._is_near_marked = False

    @property
    def is_busy(self) -> bool:
        """True if a promotion is in progress."""
        return self._in_flight is not None and not self._in_flight.done()

    def begin(
        self, context: CheckpointContext, generation: int, parent: CheckpointId | None
    ) -> None:
        """Record the generation and its parent, which is due at the first save.

        Crash: nothing changed.
        """
        self._generation, self._newest = generation, parent
        if self._schedule and context.world.is_coordinator:
            self._schedule.begin(context)
        leaders = context.places.leaders
        if len(leaders) > 1:
            world = World(leaders.index(context.world.rank), len(leaders))
            self._comms = context.comms.apart(f"promote/{generation}", world)

    def plan(
        self, context: CheckpointContext, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> PostCommitPlan:
        """Return the checkpoints to promote now and those to keep near; for the coordinator only.

        If a checkpoint is due, this method waits for the promotion in progress, and all ranks wait
        for the decision. The coordinator reports that it is at work, so the deadlines of the ranks
        do not expire.

        Crash: nothing changed.

        Args:
            context: Context for the time and the waiting ranks.
            checkpoint: Checkpoint that was just committed in the near tier.
            keep: Checkpoints that the run protects, which must become durable.
        """
        self._saves += 1
        if self._in_flight is not None and self._in_flight.done():
            self._settle()
        kept_ids = set(keep)
        if self._saves == 1 and self._newest is not None:
            kept_ids.add(self._newest)
        now_seconds = context.clock.monotonic_seconds()
        passed_seconds = now_seconds - self._began_seconds
        tiering = self._schedule.plan(context) if self._schedule else self._tiering
        is_due = tiering.is_due(self._saves, passed_seconds)
        if is_due or self._saves == 1 or self._must_promote_next:
            kept_ids.add(checkpoint)
            self._began_seconds = now_seconds
        if any(candidate not in self._errors for candidate in kept_ids - self._promoted):
            self._wait(context)
        unpromoted = tuple(sorted(kept_ids - self._promoted))
        if any(candidate not in self._errors for candidate in unpromoted):
            # Nothing else is in progress once the next promotion begins.
            return PostCommitPlan(unpromoted, unpromoted, tuple(keep))
        return PostCommitPlan((), (*unpromoted, *self._pending_ids), tuple(keep))

    def committed(
        self, context: CheckpointContext, checkpoint: CheckpointId, post_commit_plan: PostCommitPlan
    ) -> None:
        """Promote due checkpoints in the background, and collect garbage in this place's near tier.

        Collective: the leader of each place, same checkpoint.
        Crash: either tier is consistent; checkpoints not promoted yet are near.

        Args:
            context: Context for events, and the retention of the durable tier.
            checkpoint: Checkpoint that the near tier just took.
            post_commit_plan: Result of ``plan`` on the coordinator.
        """
        self._newest, self._keep = checkpoint, post_commit_plan.keep
        if post_commit_plan.due:
            self._settle()
            self._pending_ids = list(post_commit_plan.due)
            self._in_flight = self._thread.submit(
                self._promote_and_report, context, checkpoint, self._pending_ids
            )
        if not self._take_manifest(context, checkpoint):
            # Garbage collection would treat the files of a checkpoint without a manifest as
            # leftovers.
            return
        retention = Retention(self._tiering.near_total_limit)
        near, is_first = self._tiers.near, not self._is_near_marked
        self._is_near_marked = collect_garbage_after_commit(
            context, near, retention, checkpoint, post_commit_plan.staying, is_first=is_first
        )

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Record as newest a checkpoint that another process has committed and handled.

        Crash: nothing changed.
        """
        self._newest, self._keep = checkpoint, tuple(keep)

    def finish(self, context: CheckpointContext, within_seconds: float) -> None:
        """Promote the newest and all protected checkpoints, and wait for the end.

        Collective: the leader of each place.
        Crash: as in ``committed``.

        Args:
            context: Context for events, and the retention of the durable tier.
            within_seconds: Deadline for the other leaders to arrive.

        Raises:
            Fenced: A newer generation exists.
            SaveFailed: A promotion failed; the near tier has the checkpoint.
        """
        self._settle()
        # Promote only once: a run that ends calls this method again during its exit, after the
        # error.
        newest, self._newest = self._newest, None
        unpromoted = sorted({newest, *self._keep} - self._promoted) if newest else []
        if newest is None or not unpromoted:
            return
        self._finish_count += 1
        topic = f"finish/{self._finish_count}"
        try:
            # Detect a lost host at once, instead of waiting for the host.
            self._tiers.require_peers()
            unpromoted = self._agree_on(topic, newest, unpromoted, within_seconds)
            self._promote_all(context, topic, unpromoted)
            for checkpoint in unpromoted:
                if checkpoint in self._errors:
                    raise self._errors[checkpoint]
        except Fenced:
            raise
        except ResilientError as error:
            near_names = ", ".join(
                str(checkpoint) for checkpoint in unpromoted if checkpoint not in self._promoted
            )
            raise SaveFailed(
                f"{near_names} is saved only in the near tier {self._tiers.near.url}: "
                f"{error.message}; the same command on this host promotes it",
                hint=error.hint,
            ) from error

    def close(self) -> None:
        """Stop the thread.

        Crash: as in ``committed``.
        """
        self._thread.shutdown(wait=True)
        self._comms.close()

    def _wait(self, context: CheckpointContext) -> None:
        """Wait for the promotion in progress, without a deadline."""
        if self._in_flight is not None:
            with context.comms.at_work() as heartbeat:
                while not _has_ended(self._in_flight, context.limits.within_seconds / 4):
                    heartbeat()
        self._settle()

    def _settle(self) -> None:
        """Wait for the promotion in progress; after a failure the next save is promoted."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._must_promote_next = not in_flight.result()
            self._pending_ids = []

    def _agree_on(
        self,
        topic: str,
        newest: CheckpointId,
        unpromoted: list[CheckpointId],
        within_seconds: float,
    ) -> list[CheckpointId]:
        """Return the coordinator's list to promote, if all places ended at the same checkpoint."""

        def rule(answers: list[str]) -> list[str]:
            if len(set(answers)) > 1:
                ends = ", ".join(sorted(set(answers)))
                raise PeerFailed(f"hosts ended at different checkpoints: {ends}")
            return [checkpoint.folder for checkpoint in unpromoted]

        agreed_folders = agree(self._comms, topic, newest.folder, rule, within_seconds)
        return [checkpoint for folder in agreed_folders if (checkpoint := parse_checkpoint(folder))]

    def _promote_and_report(
        self, context: CheckpointContext, newest: CheckpointId, due: list[CheckpointId]
    ) -> bool:
        """Promote due checkpoints and emit failures; return False if the newest one failed."""
        topic = newest.folder
        try:
            self._promote_all(context, topic, due)
        except ResilientError as error:
            context.emit_once(checkpoint_events.PromotionFailed(due[-1].folder, error.message))
        for checkpoint in due:
            if checkpoint in self._errors:
                context.emit_once(
                    checkpoint_events.PromotionFailed(
                        checkpoint.folder, self._errors[checkpoint].message
                    )
                )
        return due[-1] in self._promoted

    def _promote_all(self, context: CheckpointContext, topic: str, due: list[CheckpointId]) -> None:
        """Promote each checkpoint, record damaged ones, then clean up the durable tier."""
        for checkpoint in due:
            try:
                self._promote_checkpoint(context, topic, checkpoint)
            except IntegrityError as error:
                # The other checkpoints are not affected.
                self._errors[checkpoint] = error
        promoted_checkpoints = [checkpoint for checkpoint in due if checkpoint in self._promoted]
        if promoted_checkpoints:
            self._collect_durable_garbage(context, promoted_checkpoints[-1])

    def _promote_checkpoint(
        self, context: CheckpointContext, topic: str, checkpoint: CheckpointId
    ) -> None:
        began_seconds = context.clock.monotonic_seconds()
        group = PromotionGroup(
            self._comms, f"{topic}/{checkpoint.folder}", context.limits.within_seconds
        )
        put_bytes = promote(self._tiers, checkpoint, self._generation, group, context.token)
        if put_bytes:
            took_seconds = context.clock.monotonic_seconds() - began_seconds
            if self._schedule:
                self._schedule.note(took_seconds)
            context.emit_once(
                checkpoint_events.CheckpointPromoted(checkpoint.folder, put_bytes, took_seconds)
            )
        # A deleted checkpoint counts as done, because no later try would find it either.
        self._promoted.add(checkpoint)
        self._errors.pop(checkpoint, None)

    def _collect_durable_garbage(self, context: CheckpointContext, newest: CheckpointId) -> None:
        if newest.generation == self._generation and context.world.is_coordinator:
            durable, retention = self._tiers.durable, context.limits.retention
            is_first = not self._is_marked
            self._is_marked = collect_garbage_after_commit(
                context, durable, retention, newest, self._keep, is_first=is_first
            )

    def _take_manifest(self, context: CheckpointContext, checkpoint: CheckpointId) -> bool:
        """Copy the manifests that only the coordinator's place has; return whether all are here."""
        if not context.world.is_coordinator:
            self._missing_manifests.append(checkpoint)
        try:
            while self._missing_manifests:
                key = self._missing_manifests[0].manifest_key
                self._tiers.near.put(key, self._tiers.get(key))
                del self._missing_manifests[0]
        except ResilientError as error:
            context.emit(events.RetentionFailed(self._missing_manifests[0].folder, error.message))
            return False
        return True


def _has_ended(work: Future[bool], seconds: float) -> bool:
    """Wait for a future; return whether it ended in time. Its result is read elsewhere."""
    try:
        work.exception(seconds)
    except TimeoutError:
        return False
    return True


def add_near_tier(
    context: CheckpointContext, near: Store, tiering: TieringOptions
) -> CheckpointContext:
    """Return a context that saves to ``near`` and promotes to the store of ``context``.

    Crash: nothing was stored.

    Args:
        context: Context at the durable repository.
        near: Store that takes every save.
        tiering: Promotion schedule, and the size of the near tier.

    Raises:
        ConfigError: Both stores are the same.
    """
    if near.url == context.store.url:
        raise ConfigError(f"the near tier is the repository itself: {near.url}")
    durable = context.store

    def report(key: str, where: str) -> None:
        context.emit(checkpoint_events.NearCopyRejected(key, where, durable.url))

    tiers = TieredStore(near, durable, report)
    return replace(context, store=tiers, promoter=TierPromoter(tiers, tiering))
