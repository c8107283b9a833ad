"""Committed checkpoint to bytes, proved: nothing leaves here that was not written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import CHUNK_BYTES, digest_bytes, digest_file
from resilient.format.extents import Extents, chunks_touched, names_in, runs
from resilient.format.names import MANIFEST
from resilient.vault.catalog import read_copy, read_manifest
from resilient.vault.fetch import fetch
from resilient.vault.mend import mend

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from resilient.format.extents import Boxes, Content
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Proved:
    """A manifest and what was asked for of its files, every byte held against its digest.

    Attributes:
        manifest: the table of contents.
        files: content by file name; a file of which nothing is wanted is not there.
        mended: names of files that are damaged in the store and were computed back from parity.
    """

    manifest: Manifest
    files: Mapping[str, Content]
    mended: tuple[str, ...] = ()


def read(
    store: Store,
    checkpoint: CheckpointId,
    parts: Collection[str] | None = None,
    boxes: Callable[[Manifest], Boxes] | None = None,
    *,
    mends: bool = False,
) -> Proved:
    """Return a checkpoint's manifest and what is wanted of ``parts``, proved.

    Files are read whole, but for those with a tensor of which only boxes are wanted: of them, the
    chunks that hold something wanted, because a chunk is the smallest thing with a digest.

    Crash: reads only.

    Args:
        store: the repository.
        checkpoint: which one.
        parts: names of the parts wanted; None for all.
        boxes: says which tensors are wanted only in part; called once, with the manifest.
        mends: compute what is damaged back from parity, in memory, where that is possible.

    Raises:
        IntegrityError: the manifest or a file is damaged, short or missing; names the file and
            the tensors that it holds, and with ``mends`` why it cannot be computed back.
        KeyNotFound: the checkpoint has no manifest, or was rotated away while it was read.
        IncompatibleCheckpoint: a newer format.
        StoreError: the store failed, which says nothing about the checkpoint.
    """
    manifest, mended = _read_manifest(store, checkpoint, mends=mends)
    wanted = _wanted(manifest, parts, boxes(manifest) if boxes else {})
    try:
        return Proved(manifest, _read_all(store, manifest, wanted), mended)
    except IntegrityError as error:
        if not (mends and manifest.parity):
            raise
        damage = error
    try:
        again = _mended(store, manifest, wanted, damage.key)
        return replace(again, mended=(*mended, *again.mended))
    except IntegrityError as error:
        raise IntegrityError(
            f"{damage.message}; parity cannot give it back: {error.message}",
            key=damage.key,
            tensor=damage.tensor,
        ) from error


def _read_all(
    store: Store, manifest: Manifest, wanted: Mapping[str, Collection[int]]
) -> dict[str, Content]:
    return {
        entry.name: _read_file(store, manifest, entry)
        if len(wanted[entry.name]) == len(entry.chunks)
        else _read_chunks(store, manifest, entry, wanted[entry.name])
        for entry in manifest.files
        if entry.name in wanted
    }


def _mended(
    store: Store, manifest: Manifest, wanted: Mapping[str, Collection[int]], damaged: str
) -> Proved:
    """Read the same once more, chunk by chunk, and compute back what is not whole.

    Args:
        store: the repository.
        manifest: the table of contents.
        wanted: numbers of chunks by file name.
        damaged: key of a file that was not whole when it was read as it lies.
    """
    entries = [entry for entry in manifest.files if entry.name in wanted]
    found = {one.name: mend([store], manifest, one, wanted[one.name]) for one in entries}
    names = [
        name
        for name, mended in found.items()
        if mended.is_computed or manifest.key(name) == damaged
    ]
    files = {name: mended.content for name, mended in found.items()}
    return Proved(manifest, files, tuple(names))


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
    documents = {one.document for one in manifest.parts if parts is None or one.name in parts}
    tensors = [one for one in manifest.tensors if parts is None or one.part in parts]
    files = documents | {region.file for one in tensors for region in one.regions}
    whole = {one.name: range(len(one.chunks)) for one in manifest.files if one.name in files}
    touched = chunks_touched(tensors, boxes)
    return {
        name: chunks if name in documents else touched.get(name, chunks)
        for name, chunks in whole.items()
        if name in documents or touched.get(name, True)
    }


def _read_chunks(
    store: Store, manifest: Manifest, entry: FileEntry, chunks: Collection[int]
) -> Extents:
    """Return some chunks of a file; neighbours are read together."""
    key = manifest.key(entry.name)
    starts, parts = [], []
    for first, count in runs(chunks):
        start = first * CHUNK_BYTES
        length = min(count * CHUNK_BYTES, entry.size_bytes - start)
        try:
            data = store.get_range(key, start, length)
        except KeyNotFound as error:
            raise _missing(store, manifest, key) from error
        _prove_chunks(manifest, entry, first, length, data)
        starts.append(start)
        parts.append(data)
    return Extents(tuple(starts), tuple(parts))


def _prove_chunks(
    manifest: Manifest, entry: FileEntry, first: int, length: int, data: bytes
) -> None:
    """Raise unless ``data`` are ``length`` bytes of the file from chunk ``first`` on."""
    key, begin = manifest.key(entry.name), first * CHUNK_BYTES
    view = memoryview(data)
    expected = entry.chunks[first : first + -(-length // CHUNK_BYTES)]
    damaged = [
        (begin + at, min(begin + at + CHUNK_BYTES, entry.size_bytes))
        for at, digest in zip(range(0, length, CHUNK_BYTES), expected, strict=True)
        if digest_bytes(view[at : at + CHUNK_BYTES]) != digest
    ]
    if damaged:
        hit = join_names(names_in(manifest.tensors, entry.name, damaged))
        raise IntegrityError(
            f"`{key}`: content is not what was committed (between bytes {damaged[0][0]} and "
            f"{damaged[-1][1]} of {entry.size_bytes}{'; in ' + hit if hit else ''})",
            key=key,
            tensor=hit,
        )


def _read_file(store: Store, manifest: Manifest, entry: FileEntry) -> bytes:
    key = manifest.key(entry.name)
    try:
        return fetch(store, key, lambda data: _prove(manifest, entry, data))
    except KeyNotFound as error:
        raise _missing(store, manifest, key) from error


def _missing(store: Store, manifest: Manifest, key: str) -> IntegrityError:
    """Return what is wrong with a checkpoint one of whose files is not there.

    Raises:
        KeyNotFound: nothing: rotation deletes the manifest first, and it is gone, too.
    """
    store.stat(manifest.checkpoint.manifest_key)
    return IntegrityError(f"`{key}` is missing", key=key)


def _prove(manifest: Manifest, entry: FileEntry, data: bytes) -> bytes:
    if digest_file(data) == entry.proof:
        return data
    key = manifest.key(entry.name)
    hit = join_names(tensors_hit(manifest, entry.name, data))
    raise IntegrityError(
        f"`{key}`: content is not what was committed ({len(data)} of {entry.size_bytes} bytes"
        f"{'; in ' + hit if hit else ''})",
        key=key,
        tensor=hit,
    )


def tensors_hit(manifest: Manifest, file: str, data: bytes) -> list[str]:
    """Return the names of tensors whose bytes in ``file`` are not what was committed.

    Crash: reads only.
    """
    return [
        tensor.name
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == file
        and digest_bytes(memoryview(data)[one.start : one.start + one.size_bytes]) != one.digest
    ]


def join_names(names: Sequence[str]) -> str:
    """Return the first few names, comma separated, and how many more there are."""
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
