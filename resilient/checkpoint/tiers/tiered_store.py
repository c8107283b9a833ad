"""Two repositories as one: a near one that takes every save, and a durable one that decides.

Lives, tags and everything else that decides lie in the durable repository alone. Files of a
checkpoint are written to the near one and read from the nearest that has them. The near one
counts only for lives whose record it holds byte for byte: what another run left there, or this
run before its repository was replaced, is not seen.

With a near repository for each host, what this host has not is read from the others' over the
network (:mod:`resilient.checkpoint.tiers.peer_store`), before the durable one is asked.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from resilient.checkpoint.catalog import folders_of, trash_of
from resilient.checkpoint.generations import create_record, list_numbers, read_generation
from resilient.errors import ConfigError, IntegrityError, KeyExists, KeyNotFound, StoreUnavailable
from resilient.format.keys import CHECKPOINTS, MANIFEST, generation_key, parse_checkpoint
from resilient.redaction import shell_quote
from resilient.storage.posix import fsync_leftovers
from resilient.storage.store import Sweepable, free_bytes
from resilient.storage.transfer import max_ranges, read_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from resilient.clock import Clock
    from resilient.storage.store import Data, ObjectInfo, Store
    from resilient.storage.transfer import Arrived, ScatterBuffer

Result = TypeVar("Result")


@runtime_checkable
class HasReplica(Protocol):
    """A store that may have another copy of an object."""

    def doubt(self, key: str) -> bool:
        """Turn away from the copy that was read; say whether there is another."""


class TieredStore:
    """A Store over a near and a durable repository of the same run.

    Args:
        near: takes the files of checkpoints, and gives them back.
        durable: decides who may write, and has what the near one has not.
        told: of the key of an object whose near copy is not what was stored, and where that is;
            once.

    Attributes:
        near: as given.
        durable: as given.
        peers: near repositories of other hosts, which can only be read.
        recalled: keys of checkpoint files that were not read from the near tier of this host, so
            that nobody has proved a copy there.
    """

    def __init__(self, near: Store, durable: Store, told: Callable[[str, str], None]) -> None:
        self.near = near
        self.durable = durable
        self.peers: tuple[Store, ...] = ()
        self.url = durable.url
        self.exclusive = durable.exclusive
        self.ranges = max_ranges(near)
        self.recalled: set[str] = set()
        self._told = told
        self._shared_lives: set[tuple[str, int]] = set()
        self._doubted: set[tuple[str, str]] = set()
        self._holders: dict[str, Store] = {}
        self._closing: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        """Store ``data``: a checkpoint's file near, all else durably."""
        (self.near if _generation_of(key) else self.durable).put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` in the tier of ``put`` if the key is free there."""
        (self.near if _generation_of(key) else self.durable).put_new(key, data)

    def get(self, key: str) -> bytes:
        """Return the whole object from the nearest place that has it."""
        return self._nearest(key, lambda store: store.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return part of an object from the nearest place that has it."""
        return self._nearest(key, lambda store: store.get_range(key, start, length))

    def fill(self, key: str, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Fill ``room`` from the nearest place that has the object."""
        return self._nearest(key, lambda store: read_into(store, key, start, room, arrived))

    def stat(self, key: str) -> ObjectInfo:
        """Return the entry of the nearest place that has the object."""
        return self._nearest(key, lambda store: store.stat(key))

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return what any place holds, each key once."""
        found = {entry.key: entry for entry in self.durable.list(prefix)}
        if not prefix or prefix.startswith(CHECKPOINTS):
            for source in (*reversed(self.peers), self.near):
                there = source.list(prefix or CHECKPOINTS)
                found |= {entry.key: entry for entry in there if self._counts(source, entry.key)}
        return [found[key] for key in sorted(found)]

    def delete(self, key: str) -> None:
        """Remove the object from the tier of ``put``."""
        (self.near if _generation_of(key) else self.durable).delete(key)

    def doubt(self, key: str) -> bool:
        """Read this object from the next place that has it from now on, if there is one.

        Returns:
            Whether that changes anything: not if there is no other copy.
        """
        holders = [one for one in self._sources(key) if self._counts(one, key) and _holds(one, key)]
        if not holders or not (len(holders) > 1 or _holds(self.durable, key)):
            return False
        with self._lock:
            self._doubted.add((holders[0].url, key))
            self._holders.pop(key, None)
        self._told(key, holders[0].url)
        return True

    def on_close(self, let_go: Callable[[], None]) -> None:
        """Have ``let_go`` called once nobody reads here any more.

        Crash: nothing changes.
        """
        self._closing.append(let_go)

    def close(self) -> None:
        """Let go of what serves other hosts, and asks them.

        Crash: nothing changes.
        """
        while self._closing:
            self._closing.pop()()

    def require_peers(self) -> None:
        """Ask every other host for a word.

        Crash: reads only.

        Raises:
            StoreUnavailable: one does not answer.
        """
        for one in self.peers:
            with suppress(KeyNotFound):
                one.stat(generation_key(1))

    def settle(self) -> None:
        """Make durable what can be seen in either tier."""
        fsync_leftovers(self.durable)
        fsync_leftovers(self.near)

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
        silent: StoreUnavailable | None = None
        for source in self._sources(key):
            try:
                found = self._ask(source, key, ask)
            except StoreUnavailable as error:
                if source is self.near:
                    raise
                silent = error
            else:
                if found is not None:
                    return found
        try:
            found = ask(self.durable)
        except KeyNotFound as error:
            # It may be there: that a host does not answer says nothing about a checkpoint.
            raise (silent or error) from error
        if _generation_of(key):
            self.recalled.add(key)
        return found

    def _ask(self, source: Store, key: str, ask: Callable[[Store], Result]) -> Result | None:
        """Return what a near repository answers, or None if it has no copy that counts."""
        if not self._counts(source, key):
            return None
        try:
            found = ask(source)
        except KeyNotFound:
            return None
        if source is not self.near:
            self.recalled.add(key)
            self._holders[key] = source
        return found

    def _sources(self, key: str) -> Sequence[Store]:
        """Return the near repositories that may have ``key``, the likeliest first."""
        holder = self._holders.get(key)
        order = [self.near, *sorted(self.peers, key=lambda one: one is not holder)]
        return [one for one in order if (one.url, key) not in self._doubted]

    def _counts(self, source: Store, key: str) -> bool:
        """Say whether a near copy of ``key`` counts: its place knows the life that wrote it."""
        number = _generation_of(key)
        if not number or (source.url, number) in self._shared_lives:
            return number > 0
        if not has_record(source, self.durable, number):
            return False
        self._shared_lives.add((source.url, number))
        return True


def nearest_store(store: Store) -> Store:
    """Return the near tier of ``store``, or ``store`` itself if it has none.

    Crash: nothing changes.
    """
    return store.near if isinstance(store, TieredStore) else store


def use_other_replica(store: Store, key: str) -> bool:
    """Turn away from the near copy of an object that does not prove.

    Crash: nothing changes.

    Returns:
        Whether there is another copy to read.
    """
    return isinstance(store, HasReplica) and store.doubt(key)


def has_record(near: Store, durable: Store, number: int) -> bool:
    """Say whether both tiers hold the same record of a life.

    Crash: reads only.
    """
    key = generation_key(number)
    try:
        return near.get(key) == durable.get(key)
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
        if has_record(tiers.near, tiers.durable, number):
            continue
        # A record that cannot be read says nothing; what it stands for is not counted either way.
        with suppress(IntegrityError, KeyNotFound):
            read_generation(tiers.near, number)
            raise _of_another_run(tiers, number)


def copy_generation_record(tiers: TieredStore, number: int) -> None:
    """Put the record of a life into the near tier too, so that what it saves there counts.

    Crash: the record is there or not; without it nothing of that life is read from there.

    Raises:
        ConfigError: the near tier has another record under that number.
        StoreError: a tier failed.
    """
    if has_record(tiers.near, tiers.durable, number):
        return
    key = generation_key(number)
    try:
        create_record(tiers.near, key, tiers.durable.get(key))
    except KeyExists as error:
        # The answer to the create may have been lost after the effect.
        if not has_record(tiers.near, tiers.durable, number):
            raise _of_another_run(tiers, number) from error


def adopt_manifests(tiers: TieredStore) -> None:
    """Put the manifests that this near tier lacks and another place has, where files lie here.

    The coordinator's place has a manifest a moment before the others. A process that dies in
    between leaves files here that a rotation would take for leftovers.

    Crash: a manifest is there, whole, or not; the checkpoint is committed either way.

    Raises:
        StoreError: a place failed.
    """
    if not tiers.peers:
        return
    folders = folders_of(tiers.near)
    whole = {one for one, names in folders.items() if MANIFEST in names}
    for checkpoint in sorted(folders.keys() - whole - trash_of(folders).keys()):
        with suppress(KeyNotFound):
            tiers.near.put(checkpoint.manifest_key, tiers.get(checkpoint.manifest_key))


def _of_another_run(tiers: TieredStore, number: int) -> ConfigError:
    return ConfigError(
        f"the near tier {tiers.near.url} holds life {number} of a run that {tiers.durable.url} "
        "does not know; each repository needs a near tier of its own, or an empty one",
        hint=f"resilient ckpt ls {shell_quote(tiers.near.url)}",
    )


def _generation_of(key: str) -> int:
    """Return the life whose checkpoint ``key`` is a file of, 0 for any other key."""
    checkpoint = parse_checkpoint(key.partition("/")[0])
    return checkpoint.generation if checkpoint else 0


def _holds(store: Store, key: str) -> bool:
    try:
        store.stat(key)
    except KeyNotFound:
        return False
    return True
