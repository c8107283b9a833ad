"""Large files range by range, several ranges at once, each proved as it arrives."""

from __future__ import annotations

import threading
from bisect import bisect_left
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from resilient.format.digest import CHUNK_BYTES, RunningDigest
from resilient.format.extents import Extents, Place, names_in, runs
from resilient.storage.buffers import Room, new_memory
from resilient.storage.filling import ranges_of
from resilient.storage.pool import each
from resilient.vault.access.damage import damaged, missing_is_damage
from resilient.vault.access.fetch import fetch_into

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from resilient.errors import IntegrityError
    from resilient.format.extents import PlacesByFile
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store


_PROVED_BYTES = 16 << 20
"""Of a range that is only proved: its memory is used again, so more of it helps nobody."""

NOWHERE: PlacesByFile = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Range:
    """Some chunks of a file that lie together, and memory for them."""

    entry: FileEntry
    start: int
    room: Room


def read_ranges(
    store: Store,
    manifest: Manifest,
    files: Mapping[FileEntry, Collection[int]],
    places: PlacesByFile = NOWHERE,
) -> dict[str, Extents]:
    """Return chunks of files, every one held against its digest.

    The bytes go straight to their places, and what has none into memory of its own, which is all
    that is taken: what is on its way is on its way there. So places hold bytes that nobody has
    proved from the first one on until this returns, and ever after if it raises.

    Crash: reads only; what was in ``places`` is gone.

    Args:
        store: the repository.
        manifest: of the checkpoint.
        files: the numbers of the chunks that are wanted of each.
        places: where some of it goes; those of which not all is wanted are left alone.

    Raises:
        IntegrityError: a file is damaged, short, long or missing.
        KeyNotFound: the checkpoint was rotated away meanwhile.
        StoreError: the store failed.
    """
    best = ranges_of(store)
    # Before memory is taken for them; of files that are read in part nothing is said of the rest.
    whole = [entry for entry, chunks in files.items() if len(chunks) == len(entry.chunks)]
    each(lambda entry: _require_size(store, manifest, entry), whole, best.in_flight)
    heads = _heads(manifest)
    laid = {
        entry: _lay_out(entry, chunks, heads.get(entry.name, 0), places.get(entry.name, ()))
        for entry, chunks in files.items()
    }
    ranges = [
        one for entry in files for run in laid[entry] for one in _cut(entry, run, best.part_bytes)
    ]
    each(lambda one: _read(store, manifest, one), ranges, best.in_flight)
    return {entry.name: _extents(laid[entry]) for entry in files}


def prove_file(store: Store, manifest: Manifest, entry: FileEntry) -> None:
    """Hold every byte of a file against its digests, and keep none of it.

    Memory is taken for the ranges that are on their way at once, however large the file is.

    Crash: reads only.

    Args:
        store: the repository.
        manifest: of the checkpoint.
        entry: a file of it.

    Raises:
        IntegrityError: it is damaged, short, long or missing.
        KeyNotFound: the checkpoint was rotated away meanwhile.
        StoreError: the store failed.
    """
    best, memory = ranges_of(store), _Memory()
    _require_size(store, manifest, entry)
    step = min(_step(min(best.part_bytes, _PROVED_BYTES)), entry.size_bytes)

    def read(start: int) -> None:
        room = Room([memory.of(step)[: entry.size_bytes - start]])
        _read(store, manifest, _Range(entry, start, room))

    each(read, range(0, entry.size_bytes, step or 1), best.in_flight)


class _Memory(threading.local):
    """Memory of one thread, which it fills again and again."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, size_bytes: int) -> memoryview:
        """Return so much memory, each time the same."""
        if len(self._memory) != size_bytes:
            self._memory = new_memory(size_bytes)
        return self._memory


def _require_size(store: Store, manifest: Manifest, entry: FileEntry) -> None:
    key = manifest.key(entry.name)
    with missing_is_damage(store, manifest, key):
        size_bytes = store.stat(key).size_bytes
    if size_bytes != entry.size_bytes:
        raise damaged(manifest, entry, f"{size_bytes} of {entry.size_bytes} bytes", [])


def _heads(manifest: Manifest) -> dict[str, int]:
    """Return by file name where its first tensor begins, in bytes."""
    heads: dict[str, int] = {}
    for tensor in manifest.tensors:
        for one in tensor.regions:
            heads[one.file] = min(heads.get(one.file, one.start), one.start)
    return heads


def _lay_out(
    entry: FileEntry, chunks: Collection[int], head_bytes: int, places: Sequence[Place]
) -> list[list[Place]]:
    """Return memory for each run of chunks of a file: its places, and what lies between them."""
    begins = [place.start for place in places]
    laid = []
    for first, count in runs(chunks):
        start = first * CHUNK_BYTES
        stop = min(start + count * CHUNK_BYTES, entry.size_bytes)
        inside = places[bisect_left(begins, start) : bisect_left(begins, stop)]
        laid.append(
            _filled_up([one for one in inside if one.stop <= stop], start, stop, head_bytes)
        )
    return laid


def _filled_up(places: Sequence[Place], start: int, stop: int, head_bytes: int) -> list[Place]:
    """Return ``places``, and memory of our own for the rest of what is between two offsets."""
    laid, at = [], start
    for place in (*places, Place(stop, memoryview(b""))):
        if place.start > at:
            laid.append(Place(at, new_memory(place.start - at, head_bytes - at)))
        laid.append(place)
        at = place.stop
    return laid[:-1]


def _extents(laid: Sequence[Sequence[Place]]) -> Extents:
    places = [place for run in laid for place in run]
    return Extents(tuple(one.start for one in places), tuple(one.memory for one in places))


def _cut(entry: FileEntry, run: Sequence[Place], range_bytes: int) -> Iterator[_Range]:
    """Yield ranges of whole chunks, of about ``range_bytes``."""
    step = _step(range_bytes)
    room = Room(place.memory for place in run)
    for at in range(0, len(room), step):
        yield _Range(entry, run[0].start + at, room.part(at, at + step))


def _step(range_bytes: int) -> int:
    return max(range_bytes // CHUNK_BYTES, 1) * CHUNK_BYTES


def _read(store: Store, manifest: Manifest, one: _Range) -> None:
    key, prove = manifest.key(one.entry.name), _Proving(manifest, one)
    with missing_is_damage(store, manifest, key):
        came = fetch_into(store, key, one.start, one.room, prove)
        if came < len(one.room):
            # Once more, as whatever does not fit: it may have been cut on the way.
            came = fetch_into(store, key, one.start, one.room, prove)
    if came < len(one.room):
        raise _damaged(manifest, one, came, len(one.room))


class _Proving:
    """Holds each chunk of a range against its digest, as its bytes come.

    They are digested while the processor's cache still has them: small pieces are read faster.
    """

    def __init__(self, manifest: Manifest, one: _Range) -> None:
        self._manifest = manifest
        self._one = one
        self._at = 0
        self._running = RunningDigest()

    def __call__(self, begin: int, stop: int) -> None:
        """Raise IntegrityError if a chunk whose last byte is before ``stop`` is not whole."""
        if begin != self._at:
            # They begin anew.
            self._at = begin
            self._running.take()
        while self._at < stop:
            self._go_on(stop)

    def _go_on(self, stop: int) -> None:
        """Take bytes up to ``stop``, or the end of the chunk that is being digested."""
        one, first = self._one, self._at // CHUNK_BYTES * CHUNK_BYTES
        last = min(first + CHUNK_BYTES, len(one.room))
        here = min(stop, last)
        self._running.add(one.room.cut(self._at, here))
        self._at = here
        if here < last:
            return
        if self._running.take() != one.entry.chunks[(one.start + first) // CHUNK_BYTES]:
            raise _damaged(self._manifest, one, first, last)


def _damaged(manifest: Manifest, one: _Range, first: int, last: int) -> IntegrityError:
    span = (one.start + first, one.start + last)
    where = f"between bytes {span[0]} and {span[1]} of {one.entry.size_bytes}"
    return damaged(manifest, one.entry, where, names_in(manifest.tensors, one.entry.name, [span]))
