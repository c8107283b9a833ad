"""Two repositories as one: a near one that takes every save, and a durable one that decides.

Lives, tags and everything else that decides lie in the durable repository alone. Files of a
checkpoint are written to the near one and read from the nearest that has them. The near one
counts only for lives whose record it holds byte for byte: what another run left there, or this
run before its repository was replaced, is not seen.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from resilient.errors import ConfigError, IntegrityError, KeyExists, KeyNotFound
from resilient.format.names import CHECKPOINTS, generation_key, parse_checkpoint
from resilient.storage.filling import fill, ranges_of
from resilient.storage.settling import settle
from resilient.storage.space import free_bytes
from resilient.storage.store import Sweepable
from resilient.vault.generations import create_record, list_numbers, read_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resilient.clock import Clock
    from resilient.storage.filling import Arrived
    from resilient.storage.store import Data, Entry, Store

Result = TypeVar("Result")


class TieredStore:
    """A Store over a near and a durable repository of the same run.

    Args:
        near: takes the files of checkpoints, and gives them back.
        durable: decides who may write, and has what the near one has not.
        told: of the key of an object whose near copy is not what was stored, once.

    Attributes:
        near: as given.
        durable: as given.
        recalled: keys of checkpoint files that were read from the durable tier, so that nobody
            has proved a near copy.
    """

    def __init__(self, near: Store, durable: Store, told: Callable[[str], None]) -> None:
        self.near = near
        self.durable = durable
        self.url = durable.url
        self.exclusive = durable.exclusive
        self.ranges = ranges_of(near)
        self.recalled: set[str] = set()
        self._told = told
        self._shared_lives: set[int] = set()
        self._doubted: set[str] = set()
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        """Store ``data``: a checkpoint's file near, all else durably."""
        (self.near if _generation_of(key) else self.durable).put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` in the tier of ``put`` if the key is free there."""
        (self.near if _generation_of(key) else self.durable).put_new(key, data)

    def get(self, key: str) -> bytes:
        """Return the whole object from the nearest tier that has it."""
        return self._nearest(key, lambda store: store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return part of an object from the nearest tier that has it."""
        return self._nearest(key, lambda store: store.get_range(key, start, length))

    def fill(self, key: str, start: int, view: memoryview, arrived: Arrived) -> int:
        """Fill ``view`` from the nearest tier that has the object."""
        return self._nearest(key, lambda store: fill(store, key, start, view, arrived))

    def stat(self, key: str) -> Entry:
        """Return the entry of the nearest tier that has the object."""
        return self._nearest(key, lambda store: store.stat(key))

    def list(self, prefix: str = "") -> Iterable[Entry]:
        """Return what either tier holds, each key once."""
        found = {entry.key: entry for entry in self.durable.list(prefix)}
        if not prefix or prefix.startswith(CHECKPOINTS):
            near = [one for one in self.near.list(prefix) if self._is_near(one.key)]
            found |= {entry.key: entry for entry in near}
        return [found[key] for key in sorted(found)]

    def delete(self, key: str) -> None:
        """Remove the object from the tier of ``put``."""
        (self.near if _generation_of(key) else self.durable).delete(key)

    def doubt(self, key: str) -> bool:
        """Read this object from the durable tier from now on, if it has one.

        Returns:
            Whether that changes anything: not if it is doubted already, or is not near.
        """
        with self._lock:
            if key in self._doubted or not self._is_near(key):
                return False
        try:
            self.near.stat(key)
            self.durable.stat(key)
        except KeyNotFound:
            return False
        with self._lock:
            self._doubted.add(key)
        self._told(key)
        return True

    def settle(self) -> None:
        """Make durable what can be seen in either tier."""
        settle(self.durable)
        settle(self.near)

    def free_bytes(self) -> int | None:
        """Return what a save may still write: the near tier's."""
        return free_bytes(self.near)

    def sweep(
        self, is_ours: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Remove what unfinished writes left in either tier."""
        tiers = [one for one in (self.durable, self.near) if isinstance(one, Sweepable)]
        return tuple(
            key for tier in tiers for key in tier.sweep(is_ours, older_than_seconds, clock)
        )

    def _nearest(self, key: str, ask: Callable[[Store], Result]) -> Result:
        if self._is_near(key) and key not in self._doubted:
            with suppress(KeyNotFound):
                return ask(self.near)
        found = ask(self.durable)
        if _generation_of(key):
            self.recalled.add(key)
        return found

    def _is_near(self, key: str) -> bool:
        """Say whether the near copy of ``key`` counts: both tiers know the life that wrote it."""
        number = _generation_of(key)
        if not number or number in self._shared_lives:
            return number > 0
        if not has_record(self, number):
            return False
        self._shared_lives.add(number)
        return True


def nearest(store: Store) -> Store:
    """Return the near tier of ``store``, or ``store`` itself if it has none.

    Crash: nothing changes.
    """
    return store.near if isinstance(store, TieredStore) else store


def doubt(store: Store, key: str) -> bool:
    """Turn away from the near copy of an object that does not prove.

    Crash: nothing changes.

    Returns:
        Whether there is another copy to read.
    """
    return isinstance(store, TieredStore) and store.doubt(key)


def has_record(tiers: TieredStore, number: int) -> bool:
    """Say whether both tiers hold the same record of a life.

    Crash: reads only.
    """
    try:
        near = tiers.near.get(generation_key(number))
        return near == tiers.durable.get(generation_key(number))
    except KeyNotFound:
        return False


def require_same_run(tiers: TieredStore) -> None:
    """Refuse a near tier that holds lives which the durable one does not know.

    Crash: reads only.

    Raises:
        ConfigError: it belongs to another run, or to another repository of this one.
        StoreError: a tier failed.
    """
    for number in list_numbers(tiers.near):
        if has_record(tiers, number):
            continue
        # A record that cannot be read says nothing; what it stands for is not counted either way.
        with suppress(IntegrityError, KeyNotFound):
            read_generation(tiers.near, number)
            raise _of_another_run(tiers, number)


def share_record(tiers: TieredStore, number: int) -> None:
    """Put the record of a life into the near tier too, so that what it saves there counts.

    Crash: the record is there or not; without it nothing of that life is read from there.

    Raises:
        ConfigError: the near tier has another record under that number.
        StoreError: a tier failed.
    """
    if has_record(tiers, number):
        return
    key = generation_key(number)
    try:
        create_record(tiers.near, key, tiers.durable.get(key))
    except KeyExists as error:
        # The answer to the create may have been lost after the effect.
        if not has_record(tiers, number):
            raise _of_another_run(tiers, number) from error


def require_shared_near(tiers: TieredStore, number: int, rank: int) -> None:
    """Refuse a near tier that this rank does not see as the coordinator does.

    Crash: reads only.

    Raises:
        ConfigError: this life's record is not there.
    """
    if not has_record(tiers, number):
        raise ConfigError(
            f"rank {rank} does not find life {number} in the near tier {tiers.near.url}",
            hint="`near_repo` must be one place for all ranks: with several hosts use a file "
            "system that they share, or leave it out",
        )


def _of_another_run(tiers: TieredStore, number: int) -> ConfigError:
    return ConfigError(
        f"the near tier {tiers.near.url} holds life {number} of a run that {tiers.durable.url} "
        "does not know",
        hint="give each repository a near tier of its own, or empty this one",
    )


def _generation_of(key: str) -> int:
    """Return the life whose checkpoint ``key`` is a file of, 0 for any other key."""
    checkpoint = parse_checkpoint(key.partition("/")[0])
    return checkpoint.generation if checkpoint else 0
