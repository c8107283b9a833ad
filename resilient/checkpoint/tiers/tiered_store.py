"""One store over a near repository (fast, local) and a durable repository (permanent).

Files of a checkpoint are written to the near repository and read from the nearest repository that
has them. All other objects, such as tags and the records of attempts (generation records), are
written to the durable repository. The durable repository therefore decides which process may write.
The near repository has copies of generation records. The store uses the near repository only for a
generation whose record is equal in both repositories, byte for byte. The store therefore ignores
leftovers of another run, or of this run before its repository was replaced.

With a near repository per host, missing files are first read from the near repositories of other
hosts over the network (:mod:`resilient.checkpoint.tiers.peer_store`).
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
    """Store that may have another copy of an object."""

    def exclude_copy(self, key: str) -> bool:
        """Stop using the copy that was read; return whether another copy exists."""


class TieredStore:
    """Store over a near and a durable repository of the same run.

    Args:
        near: Repository that takes and returns the files of checkpoints.
        durable: Repository that decides which process may write, and has the remaining files.
        on_excluded_copy: Callback with the key of an object whose near copy is damaged, and the
            place of that copy; called once per copy.

    Attributes:
        near: As given.
        durable: As given.
        peers: Near repositories of other hosts, read-only.
        unverified_keys: Keys of checkpoint files that were not read from this host's near tier. The
            near copy of these files is therefore unverified.
    """

    def __init__(
        self, near: Store, durable: Store, on_excluded_copy: Callable[[str, str], None]
    ) -> None:
        self.near = near
        self.durable = durable
        self.peers: tuple[Store, ...] = ()
        self.url = durable.url
        self.exclusive = durable.exclusive
        self.ranges = max_ranges(near)
        self.unverified_keys: set[str] = set()
        self._on_excluded_copy = on_excluded_copy
        self._shared_generations: set[tuple[str, int]] = set()
        self._excluded_copies: set[tuple[str, str]] = set()
        self._holders: dict[str, Store] = {}
        self._close_callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        """Store ``data``: a checkpoint's file near, everything else durably."""
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

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from the nearest place that has the object."""
        return self._nearest(key, lambda store: read_into(store, key, start, buffer, on_arrival))

    def stat(self, key: str) -> ObjectInfo:
        """Return the entry of the nearest place that has the object."""
        return self._nearest(key, lambda store: store.stat(key))

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return the objects of all places, each key once."""
        entries = {entry.key: entry for entry in self.durable.list(prefix)}
        if not prefix or prefix.startswith(CHECKPOINTS):
            for source in (*reversed(self.peers), self.near):
                source_entries = source.list(prefix or CHECKPOINTS)
                entries |= {
                    entry.key: entry
                    for entry in source_entries
                    if self._is_valid_source(source, entry.key)
                }
        return [entries[key] for key in sorted(entries)]

    def delete(self, key: str) -> None:
        """Remove the object from the tier of ``put``."""
        (self.near if _generation_of(key) else self.durable).delete(key)

    def exclude_copy(self, key: str) -> bool:
        """From now on, read this object from the next place that has it, if any.

        Returns:
            Whether there is another copy.
        """
        holders = [
            source
            for source in self._sources(key)
            if self._is_valid_source(source, key) and _holds(source, key)
        ]
        if not holders or not (len(holders) > 1 or _holds(self.durable, key)):
            return False
        with self._lock:
            self._excluded_copies.add((holders[0].url, key))
            self._holders.pop(key, None)
        self._on_excluded_copy(key, holders[0].url)
        return True

    def on_close(self, callback: Callable[[], None]) -> None:
        """Register a callback that ``close`` calls after the last reader.

        Crash: nothing changes.
        """
        self._close_callbacks.append(callback)

    def close(self) -> None:
        """Stop serving other hosts, and close the connections to them.

        Crash: nothing changes.
        """
        while self._close_callbacks:
            self._close_callbacks.pop()()

    def require_peers(self) -> None:
        """Check that every other host responds.

        Crash: reads only.

        Raises:
            StoreUnavailable: A host does not answer.
        """
        for peer in self.peers:
            with suppress(KeyNotFound):
                peer.stat(generation_key(1))

    def settle(self) -> None:
        """Make all visible objects of both tiers durable."""
        fsync_leftovers(self.durable)
        fsync_leftovers(self.near)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the near tier, to which saves write."""
        return free_bytes(self.near)

    def sweep(
        self, is_deletable: Callable[[str], bool], older_than_seconds: float, clock: Clock
    ) -> tuple[str, ...]:
        """Remove the leftovers of unfinished writes in both tiers."""
        tiers = [tier for tier in (self.durable, self.near) if isinstance(tier, Sweepable)]
        return tuple(
            key for tier in tiers for key in tier.sweep(is_deletable, older_than_seconds, clock)
        )

    def _nearest(self, key: str, operation: Callable[[Store], Result]) -> Result:
        unavailable: StoreUnavailable | None = None
        for source in self._sources(key):
            try:
                answer = self._ask(source, key, operation)
            except StoreUnavailable as error:
                if source is self.near:
                    raise
                unavailable = error
            else:
                if answer is not None:
                    return answer
        try:
            answer = operation(self.durable)
        except KeyNotFound as error:
            # The object may exist: a host that does not answer proves nothing about a checkpoint.
            raise (unavailable or error) from error
        if _generation_of(key):
            self.unverified_keys.add(key)
        return answer

    def _ask(self, source: Store, key: str, operation: Callable[[Store], Result]) -> Result | None:
        """Return the response of a near repository, or None if it has no copy that counts."""
        if not self._is_valid_source(source, key):
            return None
        try:
            answer = operation(source)
        except KeyNotFound:
            return None
        if source is not self.near:
            self.unverified_keys.add(key)
            self._holders[key] = source
        return answer

    def _sources(self, key: str) -> Sequence[Store]:
        """Return the near repositories that may have ``key``, the likeliest first."""
        holder = self._holders.get(key)
        order = [self.near, *sorted(self.peers, key=lambda peer: peer is not holder)]
        return [source for source in order if (source.url, key) not in self._excluded_copies]

    def _is_valid_source(self, source: Store, key: str) -> bool:
        """Return whether a near copy of ``key`` counts: its place knows the writing generation."""
        number = _generation_of(key)
        if not number or (source.url, number) in self._shared_generations:
            return number > 0
        if not has_record(source, self.durable, number):
            return False
        self._shared_generations.add((source.url, number))
        return True


def nearest_store(store: Store) -> Store:
    """Return the near tier of ``store``, or ``store`` itself if it has none.

    Crash: nothing changes.
    """
    return store.near if isinstance(store, TieredStore) else store


def use_other_replica(store: Store, key: str) -> bool:
    """Stop using the near copy of an object that failed verification.

    Crash: nothing changes.

    Returns:
        Whether there is another copy to read.
    """
    return isinstance(store, HasReplica) and store.exclude_copy(key)


def has_record(near: Store, durable: Store, number: int) -> bool:
    """Return whether both tiers have the same record of a generation.

    Crash: reads only.
    """
    key = generation_key(number)
    try:
        return near.get(key) == durable.get(key)
    except KeyNotFound:
        return False


def require_same_run(tiers: TieredStore) -> None:
    """Refuse a near tier with generations that the durable tier does not have.

    Crash: reads only.

    Raises:
        ConfigError: The near tier belongs to another run, or to another repository of this run.
        StoreError: A tier failed.
    """
    for number in list_numbers(tiers.near):
        if has_record(tiers.near, tiers.durable, number):
            continue
        # An unreadable record proves nothing, and its generation does not count in either case.
        with suppress(IntegrityError, KeyNotFound):
            read_generation(tiers.near, number)
            raise _foreign_run_error(tiers, number)


def copy_generation_record(tiers: TieredStore, number: int) -> None:
    """Copy the record of a generation to the near tier, so that its saves there count.

    Crash: the record exists or not; without the record no file of that generation is read from the
        near tier.

    Raises:
        ConfigError: The near tier has another record under that number.
        StoreError: A tier failed.
    """
    if has_record(tiers.near, tiers.durable, number):
        return
    key = generation_key(number)
    try:
        create_record(tiers.near, key, tiers.durable.get(key))
    except KeyExists as error:
        # The response to the create may have been lost after the write.
        if not has_record(tiers.near, tiers.durable, number):
            raise _foreign_run_error(tiers, number) from error


def adopt_manifests(tiers: TieredStore) -> None:
    """Copy manifests that this near tier lacks from other places, if their files are here.

    The coordinator's place gets a manifest a moment before the other places. If a process dies in
    between, garbage collection would mistake the files here for leftovers.

    Crash: a manifest exists whole, or does not exist; the checkpoint is committed in either case.

    Raises:
        StoreError: A place failed.
    """
    if not tiers.peers:
        return
    folders = folders_of(tiers.near)
    committed_checkpoints = {candidate for candidate, names in folders.items() if MANIFEST in names}
    for checkpoint in sorted(folders.keys() - committed_checkpoints - trash_of(folders).keys()):
        with suppress(KeyNotFound):
            tiers.near.put(checkpoint.manifest_key, tiers.get(checkpoint.manifest_key))


def _foreign_run_error(tiers: TieredStore, number: int) -> ConfigError:
    return ConfigError(
        f"the near tier {tiers.near.url} holds generation {number} of a run that "
        f"{tiers.durable.url} does not know; each repository needs its own near tier, or an empty "
        "one",
        hint=f"resilient ckpt ls {shell_quote(tiers.near.url)}",
    )


def _generation_of(key: str) -> int:
    """Return the generation of the checkpoint that ``key`` belongs to, 0 for any other key."""
    checkpoint = parse_checkpoint(key.partition("/")[0])
    return checkpoint.generation if checkpoint else 0


def _holds(store: Store, key: str) -> bool:
    try:
        store.stat(key)
    except KeyNotFound:
        return False
    return True
