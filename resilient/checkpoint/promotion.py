"""Near -> durable promotion.

From the near tier to the durable one: files first, each proved, the manifest last.

The manifest is the same in both, to the byte. It is put by an exclusive create after a look at
the fence, so a checkpoint comes to be in the durable tier exactly as one that was saved there.
Until then its files look like leftovers if a newer one is committed there, and a sweep may take
them: so all of them are looked at once more when the manifest is there.

When what the near tier took goes on to the durable one, and what then leaves the near one.

One thread of each place copies what lies there, one checkpoint at a time. A checkpoint that is due
while another is on its way waits, and with it the next save: so the durable tier falls behind by
no more than its cadence says. What is due the coordinator alone decides, and says with the ruling
that a checkpoint is committed.

A desk with a near tier before its durable one.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint import events as events_module
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
    """Say whether a checkpoint has a manifest in a repository.

    Crash: reads only.

    Raises:
        StoreError: the store failed, which says neither.
    """
    return _size_of(store, checkpoint.manifest_key) >= 0


@dataclass(frozen=True, slots=True)
class PromotionGroup:
    """The leaders of all places, as one of them meets the others: who carries a checkpoint.

    Attributes:
        comms: the leaders; the coordinator is the first.
        topic: names this promotion, the same for all and never used before.
        within_seconds: how long they wait for one that brings no further file meanwhile.
    """

    comms: ControlGroup = field(
        default_factory=lambda: ControlGroup(InMemoryKVStore(), World(), "alone")
    )
    topic: str = "promote"
    within_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class _Cargo:
    """What one place has of a checkpoint, when that is in the durable tier.

    Attributes:
        manifest: of all places.
        data: its bytes.
        names: which files lie in this near tier.
        put_bytes: what it took to bring those that were not there.
        is_committed: whether the durable tier had the manifest before.
    """

    manifest: Manifest
    data: bytes
    names: list[str]
    put_bytes: int
    is_committed: bool


def promote(
    tiers: TieredStore,
    checkpoint: CheckpointId,
    mine: int,
    together: PromotionGroup | None = None,
    token: str = "",
) -> int:
    """Copy a checkpoint from the near tier to the durable one, and what it refers to.

    Each place brings the files that lie there; then the coordinator puts the one manifest. One
    file at a time is in memory. Then all look again, and bring back what a sweep took meanwhile.
    To one that is durable already they bring what it lacks, as far as it is near; one that is
    gone is left.

    Collective: the leader of each place, same checkpoint.
    Crash: files may be there; without a manifest the checkpoint is not in the durable tier, and
    the near one is untouched.

    Args:
        tiers: both.
        checkpoint: committed in the near tier.
        mine: number of the life that promotes.
        together: the leaders of all places; this one alone by default.
        token: token of the claim of that life; empty compares the number alone.

    Returns:
        Bytes that were put, by all.

    Raises:
        Fenced: another claim replaced this one; no manifest was put.
        IntegrityError: the near copy is damaged, or a file is nowhere; no manifest was put.
        StoreError: a tier failed; the manifest may be there, and if so it is whole.
    """
    together = together or PromotionGroup()
    fence = partial(check_fence, tiers.durable, mine, token)
    with together.comms.at_work() as beat:
        cargo: Any = capture_failure(lambda: _carry_all(tiers, checkpoint, fence, beat))
    shown = cargo
    if not isinstance(cargo, RankFailure):
        shown = {"names": cargo.names, "put": cargo.put_bytes} if cargo else None

    def rule(shown: list[Any]) -> dict[str, Any]:
        return _put_manifest(tiers, cargo, shown, fence) if cargo else {"put": 0, "is_new": False}

    ruling = _agree(together, "carried", shown, rule)
    put_bytes = int(ruling["put"])
    if ruling["is_new"]:
        # A sweep that looked before the manifest came may have taken any of it for leftovers.
        leads = together.comms.world.is_coordinator
        with together.comms.at_work() as beat:
            again = capture_failure(
                lambda: _carry_again(tiers, cargo, fence, beat, signature=leads)
            )
        put_bytes += _agree(together, "again", again, sum)
        if leads and cargo.manifest.parity:
            copy_manifest(tiers.durable, checkpoint)
    return put_bytes


def _agree(
    together: PromotionGroup, what: str, shown: Any, rule: Callable[[list[Any]], Any]
) -> Any:
    topic = f"{together.topic}/{what}"
    return agree(together.comms, topic, shown, rule, together.within_seconds)


def _carry_all(
    tiers: TieredStore,
    checkpoint: CheckpointId,
    fence: Callable[[], None],
    beat: Callable[[], None],
) -> _Cargo | None:
    """Put what lies in this near tier; None if the checkpoint is gone."""
    key = checkpoint.manifest_key
    was_committed = is_committed(tiers.durable, checkpoint)
    try:
        manifest, data = fetch(
            tiers, key, lambda data: (decode(data, key), data), DOCUMENT_BYTES_MAX
        )
    except KeyNotFound:
        return None
    here = [one for one in manifest.files if _size_of(tiers.near, manifest.key(one.name)) >= 0]
    put_bytes = _carry_each(tiers, manifest, here, fence, beat)
    return _Cargo(manifest, data, [one.name for one in here], put_bytes, was_committed)


def _carry_again(
    tiers: TieredStore,
    cargo: _Cargo | None,
    fence: Callable[[], None],
    beat: Callable[[], None],
    *,
    signature: bool,
) -> int:
    if cargo is None:
        return 0
    if signature:
        fence()
        _carry_signature(tiers, cargo.manifest)
    here = [one for one in cargo.manifest.files if one.name in cargo.names]
    return _carry_each(tiers, cargo.manifest, here, fence, beat)


def _put_manifest(
    tiers: TieredStore, cargo: _Cargo, shown: list[Any], fence: Callable[[], None]
) -> dict[str, Any]:
    """Rule over what all places brought: the manifest is put here, by the coordinator alone."""
    manifest = cargo.manifest
    put_bytes = sum(one["put"] for one in shown if one)
    if cargo.is_committed:
        return {"put": put_bytes, "is_new": False}
    carried = {name for one in shown if one for name in one["names"]}
    for entry in manifest.files:
        key = manifest.key(entry.name)
        if entry.name not in carried and _size_of(tiers.durable, key) != entry.size_bytes:
            raise IntegrityError(f"`{key}` is missing in every near tier", key=key)
    fence()
    _carry_signature(tiers, manifest)
    put_manifest(tiers.durable, manifest.checkpoint.manifest_key, cargo.data)
    return {"put": put_bytes + len(cargo.data), "is_new": True}


def _carry_each(
    tiers: TieredStore,
    manifest: Manifest,
    entries: Iterable[FileEntry],
    fence: Callable[[], None],
    beat: Callable[[], None],
) -> int:
    """Put files one after the other; return how many bytes that took."""
    put_bytes = 0
    for entry in entries:
        put_bytes += _carry(tiers, manifest, entry, fence)
        beat()
    return put_bytes


def _carry(
    tiers: TieredStore, manifest: Manifest, entry: FileEntry, fence: Callable[[], None]
) -> int:
    """Put one file unless it is there; return how many bytes that took."""
    key = manifest.key(entry.name)
    if _size_of(tiers.durable, key) == entry.size_bytes:
        return 0

    def proved(data: bytes) -> bytes:
        if digest_file(data) != entry.proof:
            raise IntegrityError(f"`{key}` in the near tier is not what was saved", key=key)
        return data

    data = fetch(tiers.near, key, proved, entry.size_bytes)
    fence()
    tiers.durable.put(key, data)
    return entry.size_bytes


def _carry_signature(tiers: TieredStore, manifest: Manifest) -> None:
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
    """Brings checkpoints from the near tier to the durable one; used by the leader of each place.

    Always promoted: what the life began from, its first save, what the run protects (its best),
    what the cadence asks for, and the last when the run closes. What failed is owed by the next
    save; what is damaged by the next that is due, so that one such asks for no more promotions.

    Args:
        tiers: both.
        tiering: how often, and what stays near.
    """

    def __init__(self, tiers: TieredStore, tiering: TieringOptions) -> None:
        self._tiers = tiers
        self._tiering = tiering
        self._pace = PromotionSchedule() if tiering.is_planned else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-promote")
        self._in_flight: Future[bool] | None = None
        self._on_its_way: list[CheckpointId] = []
        self._done: set[CheckpointId] = set()
        self._damaged: dict[CheckpointId, IntegrityError] = {}
        self._newest: CheckpointId | None = None
        self._keep: tuple[CheckpointId, ...] = ()
        self._lacking: list[CheckpointId] = []
        self._comms = ControlGroup(InMemoryKVStore(), World(), "promote")
        self._mine = 0
        self._saves = 0
        self._finishes = 0
        self._began_seconds = 0.0
        self._is_owing = False
        self._is_marked = False
        self._is_near_marked = False

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return self._in_flight is not None and not self._in_flight.done()

    def begin(self, desk: CheckpointContext, mine: int, parent: CheckpointId | None) -> None:
        """Note which life this is, and what it began from: that is due at its first save.

        Crash: nothing changed.
        """
        self._mine, self._newest = mine, parent
        if self._pace and desk.world.is_coordinator:
            self._pace.begin(desk)
        leaders = desk.places.leaders
        if len(leaders) > 1:
            world = World(leaders.index(desk.world.rank), len(leaders))
            self._comms = desk.comms.apart(f"promote/{mine}", world)

    def plan(
        self, desk: CheckpointContext, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> PostCommitPlan:
        """Return what must go on now, and what may not leave; asked of the coordinator alone.

        If something is due, waits for what is on its way: here, where all ranks wait for the
        ruling and hear that this one is at work, and no deadline of theirs runs out.

        Crash: nothing changed.

        Args:
            desk: for the time, and the ranks that wait.
            checkpoint: what the near tier took just now.
            keep: what the run protects, and so wants durable.
        """
        self._saves += 1
        if self._in_flight is not None and self._in_flight.done():
            self._settle()
        wanted = set(keep)
        if self._saves == 1 and self._newest is not None:
            wanted.add(self._newest)
        now_seconds = desk.clock.monotonic_seconds()
        passed_seconds = now_seconds - self._began_seconds
        tiering = self._pace.plan(desk) if self._pace else self._tiering
        is_due = tiering.is_due(self._saves, passed_seconds)
        if is_due or self._saves == 1 or self._is_owing:
            wanted.add(checkpoint)
            self._began_seconds = now_seconds
        if any(one not in self._damaged for one in wanted - self._done):
            self._wait(desk)
        owed = tuple(sorted(wanted - self._done))
        if any(one not in self._damaged for one in owed):
            # Nothing else is on its way, once the next begins.
            return PostCommitPlan(owed, owed, tuple(keep))
        return PostCommitPlan((), (*owed, *self._on_its_way), tuple(keep))

    def committed(
        self, desk: CheckpointContext, checkpoint: CheckpointId, orders: PostCommitPlan
    ) -> None:
        """Promote what is due, in the background, and rotate the near tier of this place.

        Collective: the leader of each place, same checkpoint.
        Crash: either tier is consistent; what is not promoted yet is near.

        Args:
            desk: whom to tell, and what stays in the durable tier.
            checkpoint: what the near tier took just now.
            orders: what ``plan`` returned at the coordinator.
        """
        self._newest, self._keep = checkpoint, orders.keep
        if orders.due:
            self._settle()
            self._on_its_way = list(orders.due)
            self._in_flight = self._thread.submit(self._try, desk, checkpoint, self._on_its_way)
        if not self._take_manifest(desk, checkpoint):
            # A rotation would take the files of what has no manifest here for leftovers.
            return
        retention = Retention(self._tiering.near_total_limit)
        near, is_first = self._tiers.near, not self._is_near_marked
        self._is_near_marked = collect_garbage_after_commit(
            desk, near, retention, checkpoint, orders.staying, is_first=is_first
        )

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Take a checkpoint for the newest that somebody else has committed and seen to.

        Crash: nothing changed.
        """
        self._newest, self._keep = checkpoint, tuple(keep)

    def finish(self, desk: CheckpointContext, within_seconds: float) -> None:
        """Bring to the durable tier the newest checkpoint and what the run protects.

        Collective: the leader of each place.
        Crash: as in ``committed``.

        Args:
            desk: whom to tell, and what stays in the durable tier.
            within_seconds: how long the other leaders may take to come.

        Raises:
            Fenced: a newer life began.
            SaveFailed: one could not be brought there; the near tier has it.
        """
        self._settle()
        # Tried once: who ends a run asks again on the way out, and was told already.
        newest, self._newest = self._newest, None
        owed = sorted({newest, *self._keep} - self._done) if newest else []
        if newest is None or not owed:
            return
        self._finishes += 1
        topic = f"finish/{self._finishes}"
        try:
            # A host that is gone is known at once, and not waited for.
            self._tiers.require_peers()
            owed = self._agree_on(topic, newest, owed, within_seconds)
            self._bring(desk, topic, owed)
            for one in owed:
                if one in self._damaged:
                    raise self._damaged[one]
        except Fenced:
            raise
        except ResilientError as error:
            near = ", ".join(str(one) for one in owed if one not in self._done)
            raise SaveFailed(
                f"{near} is saved in the near tier {self._tiers.near.url} alone: {error.message}; "
                "the same command on this host promotes it",
                hint=error.hint,
            ) from error

    def close(self) -> None:
        """End the thread.

        Crash: as in ``committed``.
        """
        self._thread.shutdown(wait=True)
        self._comms.close()

    def _wait(self, desk: CheckpointContext) -> None:
        """Wait for what is on its way, as long as that takes."""
        if self._in_flight is not None:
            with desk.comms.at_work() as beat:
                while not _has_ended(self._in_flight, desk.limits.within_seconds / 4):
                    beat()
        self._settle()

    def _settle(self) -> None:
        """Wait for what is on its way; what failed is owed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._is_owing = not in_flight.result()
            self._on_its_way = []

    def _agree_on(
        self, topic: str, newest: CheckpointId, owed: list[CheckpointId], within_seconds: float
    ) -> list[CheckpointId]:
        """Return what the coordinator says is owed, if all ended at the same checkpoint."""

        def rule(shown: list[str]) -> list[str]:
            if len(set(shown)) > 1:
                ends = ", ".join(sorted(set(shown)))
                raise PeerFailed(f"hosts ended at different checkpoints: {ends}")
            return [one.folder for one in owed]

        ruled = agree(self._comms, topic, newest.folder, rule, within_seconds)
        return [one for folder in ruled if (one := parse_checkpoint(folder))]

    def _try(
        self, desk: CheckpointContext, ordered_by: CheckpointId, due: list[CheckpointId]
    ) -> bool:
        """Promote what is due and tell what failed; False if the newest of it is owed."""
        topic = ordered_by.folder
        try:
            self._bring(desk, topic, due)
        except ResilientError as error:
            desk.tell(events_module.PromotionFailed(due[-1].folder, error.message))
        for one in due:
            if one in self._damaged:
                desk.tell(events_module.PromotionFailed(one.folder, self._damaged[one].message))
        return due[-1] in self._done

    def _bring(self, desk: CheckpointContext, topic: str, due: list[CheckpointId]) -> None:
        """Promote each that a tier has, note which are damaged, then rotate the durable one."""
        for one in due:
            try:
                self._bring_one(desk, topic, one)
            except IntegrityError as error:
                # The others are as good as ever.
                self._damaged[one] = error
        brought = [one for one in due if one in self._done]
        if brought:
            self._rotate(desk, brought[-1])

    def _bring_one(self, desk: CheckpointContext, topic: str, one: CheckpointId) -> None:
        began_seconds = desk.clock.monotonic_seconds()
        together = PromotionGroup(self._comms, f"{topic}/{one.folder}", desk.limits.within_seconds)
        put_bytes = promote(self._tiers, one, self._mine, together, desk.token)
        if put_bytes:
            took_seconds = desk.clock.monotonic_seconds() - began_seconds
            if self._pace:
                self._pace.note(took_seconds)
            desk.tell(events_module.CheckpointPromoted(one.folder, put_bytes, took_seconds))
        # What is gone, no later try would find either.
        self._done.add(one)
        self._damaged.pop(one, None)

    def _rotate(self, desk: CheckpointContext, newest: CheckpointId) -> None:
        if newest.generation == self._mine and desk.world.is_coordinator:
            durable, retention = self._tiers.durable, desk.limits.retention
            is_first = not self._is_marked
            self._is_marked = collect_garbage_after_commit(
                desk, durable, retention, newest, self._keep, is_first=is_first
            )

    def _take_manifest(self, desk: CheckpointContext, checkpoint: CheckpointId) -> bool:
        """Put the manifests that the coordinator's place alone has; say whether none lacks."""
        if not desk.world.is_coordinator:
            self._lacking.append(checkpoint)
        try:
            while self._lacking:
                key = self._lacking[0].manifest_key
                self._tiers.near.put(key, self._tiers.get(key))
                del self._lacking[0]
        except ResilientError as error:
            desk.emit(events.RetentionFailed(self._lacking[0].folder, error.message))
            return False
        return True


def _has_ended(work: Future[bool], seconds: float) -> bool:
    """Wait for work, and say whether it ended in time; how it ended is told by its result."""
    try:
        work.exception(seconds)
    except TimeoutError:
        return False
    return True


def add_near_tier(
    desk: CheckpointContext, near: Store, tiering: TieringOptions
) -> CheckpointContext:
    """Return a desk that saves to ``near`` and promotes to the store of ``desk``.

    Crash: nothing was stored.

    Args:
        desk: at the durable repository.
        near: takes every save.
        tiering: which of them go on, and what stays near.

    Raises:
        ConfigError: both are one.
    """
    if near.url == desk.store.url:
        raise ConfigError(f"the near tier is the repository itself: {near.url}")
    durable = desk.store

    def told(key: str, where: str) -> None:
        desk.emit(events_module.NearCopyRejected(key, where, durable.url))

    tiers = TieredStore(near, durable, told)
    return replace(desk, store=tiers, promoter=TierPromoter(tiers, tiering))
