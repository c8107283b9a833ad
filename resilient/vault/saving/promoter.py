"""When what the near tier took goes on to the durable one, and what then leaves the near one.

One thread of each place copies what lies there, one checkpoint at a time. A checkpoint that is due
while another is on its way waits, and with it the next save: so the durable tier falls behind by
no more than its cadence says. What is due the coordinator alone decides, and says with the ruling
that a checkpoint is committed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from resilient import events
from resilient.errors import (
    Fenced,
    IntegrityError,
    PeerFailed,
    ResilientError,
    SaveFailed,
)
from resilient.format.names import parse_checkpoint
from resilient.vault import facts
from resilient.vault.desk import Orders
from resilient.vault.registry.retention import Retention
from resilient.vault.saving.tidy import tidy
from resilient.vault.saving.tiering import Pace
from resilient.vault.tiers.promote import Together, promote
from resilient.world.agreement import agree
from resilient.world.comms import Comms
from resilient.world.memory import MemoryBoard
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.format.names import CheckpointId
    from resilient.vault.desk import Desk
    from resilient.vault.saving.tiering import Tiering
    from resilient.vault.tiers.tiers import TieredStore


class Promoter:
    """Brings checkpoints from the near tier to the durable one; used by the leader of each place.

    Always promoted: what the life began from, its first save, what the run protects (its best),
    what the cadence asks for, and the last when the run closes. What failed is owed by the next
    save; what is damaged by the next that is due, so that one such asks for no more promotions.

    Args:
        tiers: both.
        tiering: how often, and what stays near.
    """

    def __init__(self, tiers: TieredStore, tiering: Tiering) -> None:
        self._tiers = tiers
        self._tiering = tiering
        self._pace = Pace() if tiering.is_planned else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-promote")
        self._in_flight: Future[bool] | None = None
        self._on_its_way: list[CheckpointId] = []
        self._done: set[CheckpointId] = set()
        self._damaged: dict[CheckpointId, IntegrityError] = {}
        self._newest: CheckpointId | None = None
        self._keep: tuple[CheckpointId, ...] = ()
        self._lacking: list[CheckpointId] = []
        self._comms = Comms(MemoryBoard(), World(), "promote")
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

    def begin(self, desk: Desk, mine: int, parent: CheckpointId | None) -> None:
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

    def plan(self, desk: Desk, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> Orders:
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
            return Orders(owed, owed, tuple(keep))
        return Orders((), (*owed, *self._on_its_way), tuple(keep))

    def committed(self, desk: Desk, checkpoint: CheckpointId, orders: Orders) -> None:
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
        self._is_near_marked = tidy(
            desk, near, retention, checkpoint, orders.staying, is_first=is_first
        )

    def note(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> None:
        """Take a checkpoint for the newest that somebody else has committed and seen to.

        Crash: nothing changed.
        """
        self._newest, self._keep = checkpoint, tuple(keep)

    def finish(self, desk: Desk, within_seconds: float) -> None:
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

    def _wait(self, desk: Desk) -> None:
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

    def _try(self, desk: Desk, ordered_by: CheckpointId, due: list[CheckpointId]) -> bool:
        """Promote what is due and tell what failed; False if the newest of it is owed."""
        topic = ordered_by.folder
        try:
            self._bring(desk, topic, due)
        except ResilientError as error:
            desk.tell(facts.PromotionFailed(due[-1].folder, error.message))
        for one in due:
            if one in self._damaged:
                desk.tell(facts.PromotionFailed(one.folder, self._damaged[one].message))
        return due[-1] in self._done

    def _bring(self, desk: Desk, topic: str, due: list[CheckpointId]) -> None:
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

    def _bring_one(self, desk: Desk, topic: str, one: CheckpointId) -> None:
        began_seconds = desk.clock.monotonic_seconds()
        together = Together(self._comms, f"{topic}/{one.folder}", desk.limits.within_seconds)
        put_bytes = promote(self._tiers, one, self._mine, together, desk.token)
        if put_bytes:
            took_seconds = desk.clock.monotonic_seconds() - began_seconds
            if self._pace:
                self._pace.note(took_seconds)
            desk.tell(facts.CheckpointPromoted(one.folder, put_bytes, took_seconds))
        # What is gone, no later try would find either.
        self._done.add(one)
        self._damaged.pop(one, None)

    def _rotate(self, desk: Desk, newest: CheckpointId) -> None:
        if newest.generation == self._mine and desk.world.is_coordinator:
            durable, retention = self._tiers.durable, desk.limits.retention
            is_first = not self._is_marked
            self._is_marked = tidy(desk, durable, retention, newest, self._keep, is_first=is_first)

    def _take_manifest(self, desk: Desk, checkpoint: CheckpointId) -> bool:
        """Put the manifests that the coordinator's place alone has; say whether none lacks."""
        if not desk.world.is_coordinator:
            self._lacking.append(checkpoint)
        try:
            while self._lacking:
                key = self._lacking[0].manifest_key
                self._tiers.near.put(key, self._tiers.get(key))
                del self._lacking[0]
        except ResilientError as error:
            desk.emit(events.RotationFailed(self._lacking[0].folder, error.message))
            return False
        return True


def _has_ended(work: Future[bool], seconds: float) -> bool:
    """Wait for work, and say whether it ended in time; how it ended is told by its result."""
    try:
        work.exception(seconds)
    except TimeoutError:
        return False
    return True
