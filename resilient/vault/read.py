"""Committed checkpoint to bytes, proved: nothing leaves here that was not written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import CHUNK_BYTES, digest_bytes, digest_file
from resilient.format.extents import Extents, chunks_touched, names_in, runs
from resilient.format.signature import Signing
from resilient.vault.catalog import read_manifest
from resilient.vault.fetch import fetch
from resilient.vault.signing import check_contents, check_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from resilient.format.extents import Boxes, Content
    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

UNSIGNED = Signing()
_NAMED_MAX = 4


@dataclass(frozen=True, slots=True)
class Proved:
    """A manifest and what was asked for of its files, every byte held against its digest.

    Attributes:
        manifest: the table of contents.
        files: content by file name; a file of which nothing is wanted is not there.
    """

    manifest: Manifest
    files: Mapping[str, Content]


def read(
    store: Store,
    checkpoint: CheckpointId,
    parts: Collection[str] | None = None,
    boxes: Callable[[Manifest], Boxes] | None = None,
    signing: Signing = UNSIGNED,
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
        signing: whether only what is signed may be read, and by which key; files are then read
            whole.

    Raises:
        SignatureRefused: the key has not signed it, and that is required.
        IntegrityError: the manifest or a file is damaged, short or missing; names the file and
            the tensors that it holds.
        KeyNotFound: the checkpoint has no manifest, or was rotated away while it was read.
        IncompatibleCheckpoint: a newer format.
        StoreError: the store failed, which says nothing about the checkpoint.
    """
    manifest = read_manifest(store, checkpoint)
    signed = check_signature(store, manifest, signing)
    # What was signed of a file can only be held against all of it.
    in_part = boxes(manifest) if boxes and signed is None else {}
    wanted = _wanted(manifest, parts, in_part)
    proved = Proved(
        manifest,
        {
            entry.name: _read_file(store, manifest, entry)
            if len(wanted[entry.name]) == len(entry.chunks)
            else _read_chunks(store, manifest, entry, wanted[entry.name])
            for entry in manifest.files
            if entry.name in wanted
        },
    )
    if signed is not None:
        check_contents(checkpoint, signed, proved.files)
    return proved


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
    key = manifest.checkpoint.key(entry.name)
    starts, parts = [], []
    for first, count in runs(chunks):
        start = first * CHUNK_BYTES
        length = min(count * CHUNK_BYTES, entry.size_bytes - start)
        try:
            data = store.get_range(key, start, length)
        except KeyNotFound as error:
            raise IntegrityError(f"`{key}` is missing", key=key) from error
        _prove_chunks(manifest, entry, first, length, data)
        starts.append(start)
        parts.append(data)
    return Extents(tuple(starts), tuple(parts))


def _prove_chunks(
    manifest: Manifest, entry: FileEntry, first: int, length: int, data: bytes
) -> None:
    """Raise unless ``data`` are ``length`` bytes of the file from chunk ``first`` on."""
    key, begin = manifest.checkpoint.key(entry.name), first * CHUNK_BYTES
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
    key = manifest.checkpoint.key(entry.name)
    try:
        return fetch(store, key, lambda data: _prove(manifest, entry, data), entry.size_bytes)
    except KeyNotFound as error:
        # Rotation deletes the manifest first: gone with it is no damage.
        store.stat(manifest.checkpoint.manifest_key)
        raise IntegrityError(f"`{key}` is missing", key=key) from error


def _prove(manifest: Manifest, entry: FileEntry, data: bytes) -> bytes:
    if digest_file(data) == entry.proof:
        return data
    key = manifest.checkpoint.key(entry.name)
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


def join_names(names: list[str]) -> str:
    """Return the first few names, comma separated, and how many more there are."""
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
