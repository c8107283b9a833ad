"""Large files range by range, several ranges at once, each proved as it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.format.digest import CHUNK_BYTES, digest_bytes
from resilient.format.extents import Extents, names_in, runs
from resilient.storage.buffers import new_memory
from resilient.storage.filling import ranges_of
from resilient.vault.damage import damaged, missing_is_damage
from resilient.vault.fetch import fetch_into
from resilient.vault.pool import each

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from resilient.errors import IntegrityError
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store


@dataclass(frozen=True, slots=True)
class _Range:
    """Some chunks of a file that lie together, and memory for them."""

    entry: FileEntry
    start: int
    view: memoryview


def read_ranges(
    store: Store,
    manifest: Manifest,
    files: Mapping[FileEntry, Collection[int]],
) -> dict[str, Extents]:
    """Return chunks of files, every one held against its digest.

    The bytes go straight into memory of their own, which is all that is taken: what is on its way
    is on its way there.

    Crash: reads only.

    Args:
        store: the repository.
        manifest: of the checkpoint.
        files: the numbers of the chunks that are wanted of each.

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
    found = {
        entry.name: _room_for(entry, chunks, heads.get(entry.name, 0))
        for entry, chunks in files.items()
    }
    ranges = [one for entry in files for one in _cut(entry, found[entry.name], best.part_bytes)]
    each(lambda one: _read(store, manifest, one), ranges, best.in_flight)
    return found


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


def _room_for(entry: FileEntry, chunks: Collection[int], head_bytes: int) -> Extents:
    """Return memory for some chunks of a file; neighbours lie together."""
    starts, parts = [], []
    for first, count in runs(chunks):
        start = first * CHUNK_BYTES
        length = min(count * CHUNK_BYTES, entry.size_bytes - start)
        starts.append(start)
        parts.append(new_memory(length, head_bytes - start))
    return Extents(tuple(starts), tuple(parts))


def _cut(entry: FileEntry, extents: Extents, range_bytes: int) -> Iterator[_Range]:
    """Yield ranges of whole chunks, of about ``range_bytes``."""
    step = max(range_bytes // CHUNK_BYTES, 1) * CHUNK_BYTES
    for start, part in zip(extents.starts, extents.parts, strict=True):
        for at in range(0, len(part), step):
            yield _Range(entry, start + at, memoryview(part)[at : at + step])


def _read(store: Store, manifest: Manifest, one: _Range) -> None:
    key = manifest.key(one.entry.name)

    def prove(begin: int, stop: int) -> None:
        _prove(manifest, one, begin, stop)

    with missing_is_damage(store, manifest, key):
        came = fetch_into(store, key, one.start, one.view, prove)
        if came < len(one.view):
            # Once more, as whatever does not fit: it may have been cut on the way.
            came = fetch_into(store, key, one.start, one.view, prove)
    if came < len(one.view):
        raise _damaged(manifest, one, came, len(one.view))


def _prove(manifest: Manifest, one: _Range, begin: int, stop: int) -> None:
    """Raise unless the chunks whose last bytes came, between ``begin`` and ``stop``, are whole."""
    length = len(one.view)
    for first in range(begin // CHUNK_BYTES * CHUNK_BYTES, stop, CHUNK_BYTES):
        last = min(first + CHUNK_BYTES, length)
        expected = one.entry.chunks[(one.start + first) // CHUNK_BYTES]
        if last <= stop and digest_bytes(one.view[first:last]) != expected:
            raise _damaged(manifest, one, first, last)


def _damaged(manifest: Manifest, one: _Range, first: int, last: int) -> IntegrityError:
    span = (one.start + first, one.start + last)
    where = f"between bytes {span[0]} and {span[1]} of {one.entry.size_bytes}"
    return damaged(manifest, one.entry, where, names_in(manifest.tensors, one.entry.name, [span]))
