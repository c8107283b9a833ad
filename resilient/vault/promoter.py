"""When what the near tier took goes on to the durable one, and what then leaves the near one.

One of the coordinator's threads copies, one checkpoint at a time. A checkpoint that is due while
another is on its way waits, and with it the next save: so the durable tier falls behind by no
more than its cadence says.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.errors import ConfigError, Fenced, ResilientError, SaveFailed
from resilient.vault import facts
from resilient.vault.promote import is_committed, promote
from resilient.vault.retention import Retention
from resilient.vault.tidy import tidy

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.format.names import CheckpointId
    from resilient.vault.desk import Desk
    from resilient.vault.tiers import TieredStore


@dataclass(frozen=True, slots=True)
class Tiering:
    """How a near tier is used.

    Attributes:
        durable_every: each so manieth save goes on to the durable tier.
        near_total_limit: how many checkpoints the near tier keeps.

    Raises:
        ConfigError: a value that is not accepted.
    """

    durable_every: int = 1
    near_total_limit: int = 2

    def __post_init__(self) -> None:
        for name in ("durable_every", "near_total_limit"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"`{name}`={value!r} is not accepted: use at least 1")


class Promoter:
    """Brings checkpoints from the near tier to the durable one; used by the coordinator alone.

    Always promoted: what the life began from, its first save, what the run protects (its best),
    every n-th, and the last when the run closes. What failed is owed by the next save.

    Args:
        tiers: both.
        tiering: how often, and what stays near.
    """

    def __init__(self, tiers: TieredStore, tiering: Tiering) -> None:
        self._tiers = tiers
        self._tiering = tiering
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-promote")
        self._in_flight: Future[bool] | None = None
        self._on_its_way: list[CheckpointId] = []
        self._done: set[CheckpointId] = set()
        self._newest: CheckpointId | None = None
        self._keep: tuple[CheckpointId, ...] = ()
        self._mine = 0
        self._saves = 0
        self._is_owing = False
        self._is_marked = False

    def begin(self, mine: int, parent: CheckpointId | None) -> None:
        """Note which life this is, and what it began from: that is due at its first save.

        Crash: nothing changed.
        """
        self._mine, self._newest = mine, parent

    def committed(
        self, desk: Desk, checkpoint: CheckpointId, keep: Collection[CheckpointId]
    ) -> None:
        """Promote what is due by now, in the background, and rotate the near tier.

        If something is due, waits for what is on its way.

        Crash: either tier is consistent; what is not promoted yet is near.

        Args:
            desk: whom to tell, and what stays in the durable tier.
            checkpoint: what the near tier took just now.
            keep: what the run protects, and so wants durable.
        """
        self._saves += 1
        due = self._due(checkpoint, keep)
        self._newest, self._keep = checkpoint, tuple(keep)
        if due:
            self._settle()
            self._on_its_way = due
            self._in_flight = self._thread.submit(self._try, desk, due, self._keep)
        retention = Retention(self._tiering.near_total_limit)
        # What is on its way is not all there yet.
        staying = self._on_its_way
        tidy(desk, self._tiers.near, retention, checkpoint, staying, is_first=self._saves == 1)

    def finish(self, desk: Desk) -> None:
        """Bring the newest checkpoint to the durable tier, if it is not there.

        Crash: as in ``committed``.

        Raises:
            Fenced: a newer life began.
            SaveFailed: it could not be brought there; the near tier has it.
        """
        self._settle()
        # Tried once: who ends a run asks again on the way out, and was told already.
        newest, self._newest = self._newest, None
        if newest is None or newest in self._done:
            return
        try:
            self._bring(desk, [newest], self._keep)
        except Fenced:
            raise
        except ResilientError as error:
            raise SaveFailed(
                f"{newest} is saved in the near tier {self._tiers.near.url} alone: {error.message}",
                hint="mend the cause and run the same command again, where the near tier is",
            ) from error

    def close(self) -> None:
        """End the thread.

        Crash: as in ``committed``.
        """
        self._thread.shutdown(wait=True)

    def _due(self, checkpoint: CheckpointId, keep: Collection[CheckpointId]) -> list[CheckpointId]:
        """Return what must go on now, oldest first."""
        if self._in_flight is not None and self._in_flight.done():
            self._settle()
        wanted = set(keep)
        if self._saves == 1 and self._newest is not None:
            wanted.add(self._newest)
        is_nth = self._saves % self._tiering.durable_every == 0
        if is_nth or self._saves == 1 or self._is_owing:
            wanted.add(checkpoint)
        return sorted(wanted - self._done)

    def _settle(self) -> None:
        """Wait for what is on its way; what failed is owed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._is_owing = not in_flight.result()
            self._on_its_way = []

    def _try(self, desk: Desk, due: list[CheckpointId], keep: tuple[CheckpointId, ...]) -> bool:
        try:
            self._bring(desk, due, keep)
        except ResilientError as error:
            desk.tell(facts.PromotionFailed(due[-1].folder, error.message))
            return False
        return True

    def _bring(self, desk: Desk, due: list[CheckpointId], keep: tuple[CheckpointId, ...]) -> None:
        """Promote each that either tier has, then rotate the durable one."""
        for one in due:
            began_seconds = desk.clock.monotonic_seconds()
            if is_committed(self._tiers, one):
                put_bytes = promote(self._tiers, one, self._mine)
                took_seconds = desk.clock.monotonic_seconds() - began_seconds
                if put_bytes:
                    desk.tell(facts.CheckpointPromoted(one.folder, put_bytes, took_seconds))
            # What is gone, no later try would find either.
            self._done.add(one)
        newest = due[-1]
        if newest.generation == self._mine:
            durable, retention = self._tiers.durable, desk.limits.retention
            tidy(desk, durable, retention, newest, keep, is_first=not self._is_marked)
            self._is_marked = True
