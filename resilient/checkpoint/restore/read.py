"""Read what a rank needs, verified.

Large files range by range, several ranges at once, each proved as it arrives.

Committed checkpoint to bytes, proved: nothing leaves here that was not written.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import read_copy, read_manifest
from resilient.checkpoint.restore.reconstruct import reconstruct
from resilient.checkpoint.signing import check_contents, check_signature
from resilient.checkpoint.tiers.tiered_store import use_other_replica
from resilient.checkpoint.verified_read import (
    damaged,
    fetch,
    fetch_into,
    missing_is_damage,
    tensors_hit,
)
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import CHUNK_BYTES, RunningDigest, digest_file
from resilient.format.keys import MANIFEST
from resilient.format.partial_read import PartialFile, ReadTarget, chunks_touched, names_in, runs
from resilient.format.signature import UNSIGNED, SigningPolicy
from resilient.storage.transfer import ScatterBuffer, map_parallel, max_ranges, new_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from resilient.format.keys import CheckpointId
    from resilient.format.manifest import FileEntry, Manifest, TensorEntry
    from resilient.format.partial_read import Boxes, Content, PlacesByFile
    from resilient.storage.store import Store

_PROVED_BYTES = 16 << 20
"""Of a range that is only proved: its memory is used again, so more of it helps nobody."""

NOWHERE: PlacesByFile = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Range:
    """Some chunks of a file that lie together, and memory for them."""

    entry: FileEntry
    start: int
    room: ScatterBuffer


def read_ranges(
    store: Store,
    manifest: Manifest,
    files: Mapping[FileEntry, Collection[int]],
    places: PlacesByFile = NOWHERE,
) -> dict[str, PartialFile]:
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
    best = max_ranges(store)
    # Before memory is taken for them; of files that are read in part nothing is said of the rest.
    whole = [entry for entry, chunks in files.items() if len(chunks) == len(entry.chunks)]
    map_parallel(lambda entry: _require_size(store, manifest, entry), whole, best.in_flight)
    heads = _heads(manifest)
    laid = {
        entry: _lay_out(entry, chunks, heads.get(entry.name, 0), places.get(entry.name, ()))
        for entry, chunks in files.items()
    }
    ranges = [
        one for entry in files for run in laid[entry] for one in _cut(entry, run, best.part_bytes)
    ]
    map_parallel(lambda one: _read(store, manifest, one), ranges, best.in_flight)
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
    best, memory = max_ranges(store), _Memory()
    _require_size(store, manifest, entry)
    step = min(_step(min(best.part_bytes, _PROVED_BYTES)), entry.size_bytes)

    def read(start: int) -> None:
        room = ScatterBuffer([memory.of(step)[: entry.size_bytes - start]])
        _read(store, manifest, _Range(entry, start, room))

    map_parallel(read, range(0, entry.size_bytes, step or 1), best.in_flight)


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
    entry: FileEntry, chunks: Collection[int], head_bytes: int, places: Sequence[ReadTarget]
) -> list[list[ReadTarget]]:
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


def _filled_up(
    places: Sequence[ReadTarget], start: int, stop: int, head_bytes: int
) -> list[ReadTarget]:
    """Return ``places``, and memory of our own for the rest of what is between two offsets."""
    laid, at = [], start
    for place in (*places, ReadTarget(stop, memoryview(b""))):
        if place.start > at:
            laid.append(ReadTarget(at, new_memory(place.start - at, head_bytes - at)))
        laid.append(place)
        at = place.stop
    return laid[:-1]


def _extents(laid: Sequence[Sequence[ReadTarget]]) -> PartialFile:
    places = [place for run in laid for place in run]
    return PartialFile(tuple(one.start for one in places), tuple(one.memory for one in places))


def _cut(entry: FileEntry, run: Sequence[ReadTarget], range_bytes: int) -> Iterator[_Range]:
    """Yield ranges of whole chunks, of about ``range_bytes``."""
    step = _step(range_bytes)
    room = ScatterBuffer(place.memory for place in run)
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


SMALL_BYTES = 8 << 20
"""A file that is no larger is read in one piece, and one after the other."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A manifest and what was asked for of its files, every byte held against its digest.

    Attributes:
        manifest: the table of contents.
        files: content by file name; a file of which nothing is wanted is not there.
        mended: names of files that are damaged in the store and were computed back from parity.
    """

    manifest: Manifest
    files: Mapping[str, Content]
    mended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a rank needs of a checkpoint, and where.

    Attributes:
        parts: stored names of the parts; None for all.
        boxes: given a manifest, says which tensors are wanted only in part; None: all whole.
        signing: whether only what is signed may be read, and by which key; files are then read
            whole.
        mends: whether damage is computed back from parity, in memory, where that is possible.
        places: given a manifest, says which bytes go straight to memory that somebody has. They
            are proved there: it holds what nobody has proved until all was read, and something
            of the checkpoint if that fails.
    """

    parts: Collection[str] | None = None
    boxes: Callable[[Manifest], Boxes] | None = None
    signing: SigningPolicy = UNSIGNED
    mends: bool = False
    places: Callable[[Manifest], PlacesByFile] | None = None


def read(
    store: Store,
    checkpoint: CheckpointId,
    parts: Collection[str] | None = None,
    boxes: Callable[[Manifest], Boxes] | None = None,
    signing: SigningPolicy = UNSIGNED,
    *,
    mends: bool = False,
) -> VerifiedCheckpoint:
    """Return a checkpoint's manifest and what is wanted of ``parts``, proved, in memory of its own.

    Crash: reads only.

    Args:
        store: the repository.
        checkpoint: which one.
        parts: see :class:`Wanted`, as all that follow.
        boxes: called with the manifest.
        signing: by default everything may be read.
        mends: not by default.

    Raises:
        ResilientError: as :func:`read_wanted`.
    """
    return read_wanted(store, checkpoint, ReadRequest(parts, boxes, signing, mends))


def read_wanted(store: Store, checkpoint: CheckpointId, wanted: ReadRequest) -> VerifiedCheckpoint:
    """Return a checkpoint's manifest and what is wanted of it, proved.

    Files are read whole, but for those with a tensor of which only boxes are wanted: of them, the
    chunks that hold something wanted, because a chunk is the smallest thing with a digest. Large
    files are read in ranges, several at once, and proved as they arrive.

    Crash: reads only; with places, what was in them is gone.

    Args:
        store: the repository.
        checkpoint: which one.
        wanted: what, and where.

    Raises:
        SignatureRefused: the key has not signed it, and that is required.
        IntegrityError: the manifest or a file is damaged, short or missing; names the file and
            the tensors that it holds, and with ``mends`` why it cannot be computed back.
        KeyNotFound: the checkpoint has no manifest, or was rotated away while it was read.
        IncompatibleCheckpoint: a newer format.
        StoreError: the store failed, which says nothing about the checkpoint.
    """
    while True:
        try:
            return _read_read(store, checkpoint, wanted)
        except IntegrityError as error:
            # A damaged near copy is no damage of the checkpoint, as long as there is another.
            if not use_other_replica(store, error.key):
                raise


def _read_read(store: Store, checkpoint: CheckpointId, wanted: ReadRequest) -> VerifiedCheckpoint:
    manifest, mended = _read_manifest(store, checkpoint, mends=wanted.mends)
    signed = check_signature(store, manifest, wanted.signing)
    # What was signed of a file can only be held against all of it.
    chunks = (
        _wanted(manifest, wanted.parts, wanted.boxes(manifest) if wanted.boxes else {})
        if signed is None
        else _whole(manifest, wanted.parts)
    )
    places = wanted.places(manifest) if wanted.places else NOWHERE
    try:
        proved = VerifiedCheckpoint(manifest, _read_all(store, manifest, chunks, places))
    except IntegrityError as damage:
        if not (wanted.mends and manifest.parity):
            raise
        proved = _mended_or(damage, store, manifest, chunks)
    if signed is not None:
        check_contents(manifest, signed, proved.files)
    return replace(proved, mended=(*mended, *proved.mended))


def _mended_or(
    damage: IntegrityError,
    store: Store,
    manifest: Manifest,
    wanted: Mapping[str, Collection[int]],
) -> VerifiedCheckpoint:
    """Return what parity gives back, or raise the damage with why it gives nothing."""
    try:
        return _mended(store, manifest, wanted, damage.key)
    except IntegrityError as error:
        raise IntegrityError(
            f"{damage.message}; parity cannot give it back: {error.message}",
            key=damage.key,
            tensor=damage.tensor,
        ) from error


def _read_all(
    store: Store, manifest: Manifest, wanted: Mapping[str, Collection[int]], places: PlacesByFile
) -> dict[str, Content]:
    files = [entry for entry in manifest.files if entry.name in wanted]
    large = {one: wanted[one.name] for one in files if not _is_small(one, wanted[one.name])}
    small = {one.name: _read_file(store, manifest, one) for one in files if one not in large}
    return {**small, **read_ranges(store, manifest, large, places)}


def _is_small(entry: FileEntry, chunks: Collection[int]) -> bool:
    """Say whether a file is wanted whole and is not worth to be read in ranges."""
    return entry.size_bytes <= SMALL_BYTES and len(chunks) == len(entry.chunks)


def _mended(
    store: Store, manifest: Manifest, wanted: Mapping[str, Collection[int]], damaged: str
) -> VerifiedCheckpoint:
    """Read the same once more, chunk by chunk, and compute back what is not whole.

    Args:
        store: the repository.
        manifest: the table of contents.
        wanted: numbers of chunks by file name.
        damaged: key of a file that was not whole when it was read as it lies.
    """
    entries = [entry for entry in manifest.files if entry.name in wanted]
    found = {one.name: reconstruct([store], manifest, one, wanted[one.name]) for one in entries}
    names = [
        name
        for name, mended in found.items()
        if mended.is_computed or manifest.key(name) == damaged
    ]
    files = {name: mended.content for name, mended in found.items()}
    return VerifiedCheckpoint(manifest, files, tuple(names))


def _read_manifest(
    store: Store, checkpoint: CheckpointId, *, mends: bool
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest, or its copy if it is there and damaged; and what was damaged."""
    try:
        return read_manifest(store, checkpoint), ()
    except IntegrityError:
        if not mends:
            raise
        with suppress(IntegrityError, KeyNotFound):
            return read_copy(store, checkpoint), (MANIFEST,)
        raise


def _wanted(
    manifest: Manifest, parts: Collection[str] | None, boxes: Boxes
) -> dict[str, Collection[int]]:
    """Return the chunks to read by file name."""
    documents = _documents(manifest, parts)
    touched = chunks_touched(_tensors(manifest, parts), boxes)
    return {
        name: chunks if name in documents else touched.get(name, chunks)
        for name, chunks in _whole(manifest, parts).items()
        if name in documents or touched.get(name, True)
    }


def _whole(manifest: Manifest, parts: Collection[str] | None) -> dict[str, Collection[int]]:
    """Return all chunks of every file that holds something wanted."""
    tensors = _tensors(manifest, parts)
    files = _documents(manifest, parts)
    files |= {region.file for one in tensors for region in one.regions}
    return {one.name: range(len(one.chunks)) for one in manifest.files if one.name in files}


def _documents(manifest: Manifest, parts: Collection[str] | None) -> set[str]:
    return {one.document for one in manifest.parts if parts is None or one.name in parts}


def _tensors(manifest: Manifest, parts: Collection[str] | None) -> list[TensorEntry]:
    return [one for one in manifest.tensors if parts is None or one.part in parts]


def _read_file(store: Store, manifest: Manifest, entry: FileEntry) -> bytes:
    key = manifest.key(entry.name)
    with missing_is_damage(store, manifest, key):
        return fetch(store, key, lambda data: _prove(manifest, entry, data), entry.size_bytes)


def _prove(manifest: Manifest, entry: FileEntry, data: bytes) -> bytes:
    if digest_file(data) == entry.proof:
        return data
    where = f"{len(data)} of {entry.size_bytes} bytes"
    raise damaged(manifest, entry, where, tensors_hit(manifest, entry.name, data))
