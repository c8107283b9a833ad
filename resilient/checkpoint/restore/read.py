"""Verified read of the bytes that a rank needs from a committed checkpoint.

Large files are read in ranges, several ranges at once. Each range is verified as it arrives.
Unverified bytes never leave this module, except in memory that the caller provides.
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

_VERIFY_RANGE_BYTES = 16 << 20
"""Largest range that is only verified. Its memory is reused, so a larger range brings no gain."""

NOWHERE: PlacesByFile = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Range:
    """Adjacent chunks of a file, and memory for them."""

    entry: FileEntry
    start: int
    buffer: ScatterBuffer


def read_ranges(
    store: Store,
    manifest: Manifest,
    files: Mapping[FileEntry, Collection[int]],
    places: PlacesByFile = NOWHERE,
) -> dict[str, PartialFile]:
    """Read chunks of files, each verified against its digest.

    Bytes with a place are read directly into the place, and all other bytes into separate memory.
    No further memory is used. A place has unverified bytes until this function returns, and after
    an error.

    Crash: reads only; the previous content of ``places`` is gone.

    Args:
        store: Repository.
        manifest: Manifest of the checkpoint.
        files: Numbers of the wanted chunks of each file.
        places: Destinations of some bytes; a place is used only if all of its bytes are wanted.

    Raises:
        IntegrityError: A file is damaged, short, long or missing.
        KeyNotFound: The checkpoint was deleted meanwhile.
        StoreError: The store failed.
    """
    best = max_ranges(store)
    # Check the sizes before memory is allocated for the files. The size of a file that is read in
    # part is not checked.
    full_entries = [entry for entry, chunks in files.items() if len(chunks) == len(entry.chunks)]
    map_parallel(lambda entry: _require_size(store, manifest, entry), full_entries, best.in_flight)
    heads = _heads(manifest)
    layouts = {
        entry: _lay_out(entry, chunks, heads.get(entry.name, 0), places.get(entry.name, ()))
        for entry, chunks in files.items()
    }
    ranges = [
        part
        for entry in files
        for run in layouts[entry]
        for part in _cut(entry, run, best.part_bytes)
    ]
    map_parallel(lambda span: _read(store, manifest, span), ranges, best.in_flight)
    return {entry.name: _extents(layouts[entry]) for entry in files}


def verify_file(store: Store, manifest: Manifest, entry: FileEntry) -> None:
    """Verify every byte of a file against its digests, without keeping the bytes.

    Memory is used for the ranges in flight only, for files of any size.

    Crash: reads only.

    Args:
        store: Repository.
        manifest: Manifest of the checkpoint.
        entry: Entry of the file.

    Raises:
        IntegrityError: The file is damaged, short, long or missing.
        KeyNotFound: The checkpoint was deleted meanwhile.
        StoreError: The store failed.
    """
    best, memory = max_ranges(store), _Memory()
    _require_size(store, manifest, entry)
    step = min(_step(min(best.part_bytes, _VERIFY_RANGE_BYTES)), entry.size_bytes)

    def read(start: int) -> None:
        buffer = ScatterBuffer([memory.of(step)[: entry.size_bytes - start]])
        _read(store, manifest, _Range(entry, start, buffer))

    map_parallel(read, range(0, entry.size_bytes, step or 1), best.in_flight)


class _Memory(threading.local):
    """Memory of one thread, which is reused for each range."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, size_bytes: int) -> memoryview:
        """Return memory of this size, the same each time."""
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
    """Return the offset of the first tensor by file name, in bytes."""
    heads: dict[str, int] = {}
    for tensor in manifest.tensors:
        for region in tensor.regions:
            heads[region.file] = min(heads.get(region.file, region.start), region.start)
    return heads


def _lay_out(
    entry: FileEntry, chunks: Collection[int], head_bytes: int, places: Sequence[ReadTarget]
) -> list[list[ReadTarget]]:
    """Return memory for each run of chunks of a file: its places, and the gaps between them."""
    begins = [place.start for place in places]
    extents = []
    for first, count in runs(chunks):
        start = first * CHUNK_BYTES
        stop = min(start + count * CHUNK_BYTES, entry.size_bytes)
        run_places = places[bisect_left(begins, start) : bisect_left(begins, stop)]
        extents.append(
            _filled_up(
                [place for place in run_places if place.stop <= stop], start, stop, head_bytes
            )
        )
    return extents


def _filled_up(
    places: Sequence[ReadTarget], start: int, stop: int, head_bytes: int
) -> list[ReadTarget]:
    """Return ``places``, and new memory for all other bytes between two offsets."""
    filled, at = [], start
    for place in (*places, ReadTarget(stop, memoryview(b""))):
        if place.start > at:
            filled.append(ReadTarget(at, new_memory(place.start - at, head_bytes - at)))
        filled.append(place)
        at = place.stop
    return filled[:-1]


def _extents(layouts: Sequence[Sequence[ReadTarget]]) -> PartialFile:
    places = [place for run in layouts for place in run]
    return PartialFile(
        tuple(place.start for place in places), tuple(place.memory for place in places)
    )


def _cut(entry: FileEntry, run: Sequence[ReadTarget], range_bytes: int) -> Iterator[_Range]:
    """Yield ranges of whole chunks, of about ``range_bytes``."""
    step = _step(range_bytes)
    buffer = ScatterBuffer(place.memory for place in run)
    for at in range(0, len(buffer), step):
        yield _Range(entry, run[0].start + at, buffer.part(at, at + step))


def _step(range_bytes: int) -> int:
    return max(range_bytes // CHUNK_BYTES, 1) * CHUNK_BYTES


def _read(store: Store, manifest: Manifest, span: _Range) -> None:
    key, verifier = manifest.key(span.entry.name), _ChunkVerifier(manifest, span)
    with missing_is_damage(store, manifest, key):
        read_bytes = fetch_into(store, key, span.start, span.buffer, verifier)
        if read_bytes < len(span.buffer):
            # Read again, as after a failed verification: the response may have been cut on the way.
            read_bytes = fetch_into(store, key, span.start, span.buffer, verifier)
    if read_bytes < len(span.buffer):
        raise _damaged(manifest, span, read_bytes, len(span.buffer))


class _ChunkVerifier:
    """Verification of each chunk of a range against its digest, as its bytes arrive.

    The bytes are digested while they are in the processor's cache, so small pieces are faster.
    """

    def __init__(self, manifest: Manifest, span: _Range) -> None:
        self._manifest = manifest
        self._span = span
        self._at = 0
        self._running = RunningDigest()

    def __call__(self, begin: int, stop: int) -> None:
        """Raise IntegrityError if a chunk whose last byte is before ``stop`` is not whole."""
        if begin != self._at:
            # The read begins again.
            self._at = begin
            self._running.take()
        while self._at < stop:
            self._digest_next(stop)

    def _digest_next(self, stop: int) -> None:
        """Digest bytes up to ``stop``, or up to the end of the current chunk."""
        span, first = self._span, self._at // CHUNK_BYTES * CHUNK_BYTES
        last = min(first + CHUNK_BYTES, len(span.buffer))
        piece_end = min(stop, last)
        self._running.add(span.buffer.cut(self._at, piece_end))
        self._at = piece_end
        if piece_end < last:
            return
        if self._running.take() != span.entry.chunks[(span.start + first) // CHUNK_BYTES]:
            raise _damaged(self._manifest, span, first, last)


def _damaged(manifest: Manifest, checkpoint: _Range, first: int, last: int) -> IntegrityError:
    span = (checkpoint.start + first, checkpoint.start + last)
    range_text = f"between bytes {span[0]} and {span[1]} of {checkpoint.entry.size_bytes}"
    return damaged(
        manifest,
        checkpoint.entry,
        range_text,
        names_in(manifest.tensors, checkpoint.entry.name, [span]),
    )


SMALL_BYTES = 8 << 20
"""A file of at most this size is read in one piece, one file after the other."""


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """Manifest and requested file contents, every byte verified against its digest.

    Attributes:
        manifest: Manifest.
        files: Content by file name; files without wanted bytes are absent.
        reconstructed: Names of files that were damaged and reconstructed from parity.
    """

    manifest: Manifest
    files: Mapping[str, Content]
    reconstructed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Parts of a checkpoint that a rank needs, and their destinations.

    Attributes:
        parts: Stored names of the parts; None for all.
        boxes: Function from the manifest to the wanted boxes of tensors; None for all whole
            tensors.
        signing: Whether only signed content may be read, and the key; files are then read whole.
        reconstructs: Whether damage is reconstructed from parity, in memory, if possible.
        places: Function from the manifest to memory of the caller that receives bytes directly.
            This memory has unverified bytes until all reads are done, and parts of the checkpoint
            after an error.
    """

    parts: Collection[str] | None = None
    boxes: Callable[[Manifest], Boxes] | None = None
    signing: SigningPolicy = UNSIGNED
    reconstructs: bool = False
    places: Callable[[Manifest], PlacesByFile] | None = None


def read(
    store: Store,
    checkpoint: CheckpointId,
    parts: Collection[str] | None = None,
    boxes: Callable[[Manifest], Boxes] | None = None,
    signing: SigningPolicy = UNSIGNED,
    *,
    reconstructs: bool = False,
) -> VerifiedCheckpoint:
    """Read a checkpoint's manifest and the wanted ``parts``, verified, into new memory.

    Crash: reads only.

    Args:
        store: Repository.
        checkpoint: Checkpoint.
        parts: See :class:`ReadRequest`, also for the following arguments.
        boxes: Function from the manifest.
        signing: By default everything may be read.
        reconstructs: False by default.

    Raises:
        ResilientError: As :func:`read_wanted`.
    """
    return read_wanted(store, checkpoint, ReadRequest(parts, boxes, signing, reconstructs))


def read_wanted(store: Store, checkpoint: CheckpointId, request: ReadRequest) -> VerifiedCheckpoint:
    """Read a checkpoint's manifest and the wanted bytes, verified.

    Files are read whole, unless only boxes of a tensor are wanted. In that case only the chunks
    with wanted bytes are read, because a chunk is the smallest unit with a digest. Large files are
    read in ranges, several at once, and verified as they arrive.

    Crash: reads only; with places, their previous content is gone.

    Args:
        store: Repository.
        checkpoint: Checkpoint.
        request: Read request.

    Raises:
        SignatureRefused: A signature is required, and the key has not signed the checkpoint.
        IntegrityError: The manifest or a file is damaged, short or missing. The error names the
            file and its tensors. With ``reconstructs`` it also says why reconstruction failed.
        KeyNotFound: The checkpoint has no manifest, or was deleted while it was read.
        IncompatibleCheckpoint: The format is newer.
        StoreError: The store failed; the checkpoint may be intact.
    """
    while True:
        try:
            return _read_from_nearest(store, checkpoint, request)
        except IntegrityError as error:
            # A damaged near copy does not damage the checkpoint while another copy exists.
            if not use_other_replica(store, error.key):
                raise


def _read_from_nearest(
    store: Store, checkpoint: CheckpointId, request: ReadRequest
) -> VerifiedCheckpoint:
    manifest, reconstructed = _read_manifest(store, checkpoint, reconstructs=request.reconstructs)
    signed = check_signature(store, manifest, request.signing)
    # A signed digest covers the whole file, so the whole file must be read.
    chunks = (
        _wanted(manifest, request.parts, request.boxes(manifest) if request.boxes else {})
        if signed is None
        else _whole(manifest, request.parts)
    )
    places = request.places(manifest) if request.places else NOWHERE
    try:
        verified = VerifiedCheckpoint(manifest, _read_all(store, manifest, chunks, places))
    except IntegrityError as damage:
        if not (request.reconstructs and manifest.parity):
            raise
        verified = _reconstructed_or(damage, store, manifest, chunks)
    if signed is not None:
        check_contents(manifest, signed, verified.files)
    return replace(verified, reconstructed=(*reconstructed, *verified.reconstructed))


def _reconstructed_or(
    damage: IntegrityError,
    store: Store,
    manifest: Manifest,
    chunks_by_file: Mapping[str, Collection[int]],
) -> VerifiedCheckpoint:
    """Return the reconstructed content, or raise the damage with the reason why parity fails."""
    try:
        return _read_and_reconstruct(store, manifest, chunks_by_file, damage.key)
    except IntegrityError as error:
        raise IntegrityError(
            f"{damage.message}; parity cannot reconstruct it: {error.message}",
            key=damage.key,
            tensor=damage.tensor,
        ) from error


def _read_all(
    store: Store,
    manifest: Manifest,
    chunks_by_file: Mapping[str, Collection[int]],
    places: PlacesByFile,
) -> dict[str, Content]:
    files = [entry for entry in manifest.files if entry.name in chunks_by_file]
    large_files = {
        file: chunks_by_file[file.name]
        for file in files
        if not _is_small(file, chunks_by_file[file.name])
    }
    small_files = {
        file.name: _read_file(store, manifest, file) for file in files if file not in large_files
    }
    return {**small_files, **read_ranges(store, manifest, large_files, places)}


def _is_small(entry: FileEntry, chunks: Collection[int]) -> bool:
    """Return whether a file is wanted whole and too small to be read in ranges."""
    return entry.size_bytes <= SMALL_BYTES and len(chunks) == len(entry.chunks)


def _read_and_reconstruct(
    store: Store, manifest: Manifest, chunks_by_file: Mapping[str, Collection[int]], damaged: str
) -> VerifiedCheckpoint:
    """Read the same chunks again one by one, and reconstruct those that are not whole.

    Args:
        store: Repository.
        manifest: Manifest.
        chunks_by_file: Numbers of chunks by file name.
        damaged: Key of a file that failed verification in the direct read.
    """
    entries = [entry for entry in manifest.files if entry.name in chunks_by_file]
    reconstructed = {
        entry.name: reconstruct([store], manifest, entry, chunks_by_file[entry.name])
        for entry in entries
    }
    names = [
        name
        for name, file in reconstructed.items()
        if file.is_computed or manifest.key(name) == damaged
    ]
    files = {name: file.content for name, file in reconstructed.items()}
    return VerifiedCheckpoint(manifest, files, tuple(names))


def _read_manifest(
    store: Store, checkpoint: CheckpointId, *, reconstructs: bool
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest, or its copy if it is damaged; and the names of damaged files."""
    try:
        return read_manifest(store, checkpoint), ()
    except IntegrityError:
        if not reconstructs:
            raise
        with suppress(IntegrityError, KeyNotFound):
            return read_copy(store, checkpoint), (MANIFEST,)
        raise


def _wanted(
    manifest: Manifest, parts: Collection[str] | None, boxes: Boxes
) -> dict[str, Collection[int]]:
    """Return the chunks to read by file name."""
    documents = _documents(manifest, parts)
    touched_chunks = chunks_touched(_tensors(manifest, parts), boxes)
    return {
        name: chunks if name in documents else touched_chunks.get(name, chunks)
        for name, chunks in _whole(manifest, parts).items()
        if name in documents or touched_chunks.get(name, True)
    }


def _whole(manifest: Manifest, parts: Collection[str] | None) -> dict[str, Collection[int]]:
    """Return all chunks of every file that holds wanted bytes."""
    tensors = _tensors(manifest, parts)
    files = _documents(manifest, parts)
    files |= {region.file for tensor in tensors for region in tensor.regions}
    return {file.name: range(len(file.chunks)) for file in manifest.files if file.name in files}


def _documents(manifest: Manifest, parts: Collection[str] | None) -> set[str]:
    return {part.document for part in manifest.parts if parts is None or part.name in parts}


def _tensors(manifest: Manifest, parts: Collection[str] | None) -> list[TensorEntry]:
    return [tensor for tensor in manifest.tensors if parts is None or tensor.part in parts]


def _read_file(store: Store, manifest: Manifest, entry: FileEntry) -> bytes:
    key = manifest.key(entry.name)
    with missing_is_damage(store, manifest, key):
        return fetch(
            store, key, lambda data: _require_intact(manifest, entry, data), entry.size_bytes
        )


def _require_intact(manifest: Manifest, entry: FileEntry, data: bytes) -> bytes:
    if digest_file(data) == entry.proof:
        return data
    size_text = f"{len(data)} of {entry.size_bytes} bytes"
    raise damaged(manifest, entry, size_text, tensors_hit(manifest, entry.name, data))
