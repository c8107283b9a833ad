"""Committed checkpoint to bytes, proved: nothing leaves here that was not written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import digest_file
from resilient.format.extents import chunks_touched
from resilient.format.names import MANIFEST
from resilient.format.signature import UNSIGNED, Signing
from resilient.vault.access.damage import damaged, missing_is_damage, tensors_hit
from resilient.vault.access.fetch import fetch
from resilient.vault.reading.bulk import NOWHERE, read_ranges
from resilient.vault.reading.mend import mend
from resilient.vault.registry.catalog import read_copy, read_manifest
from resilient.vault.registry.signing import check_contents, check_signature
from resilient.vault.tiers.tiers import doubt

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from resilient.format.extents import Boxes, Content, PlacesByFile
    from resilient.format.manifest import FileEntry, Manifest, TensorEntry
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

SMALL_BYTES = 8 << 20
"""A file that is no larger is read in one piece, and one after the other."""


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


@dataclass(frozen=True, slots=True)
class Wanted:
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
    signing: Signing = UNSIGNED
    mends: bool = False
    places: Callable[[Manifest], PlacesByFile] | None = None


def read(
    store: Store,
    checkpoint: CheckpointId,
    parts: Collection[str] | None = None,
    boxes: Callable[[Manifest], Boxes] | None = None,
    signing: Signing = UNSIGNED,
    *,
    mends: bool = False,
) -> Proved:
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
    return read_wanted(store, checkpoint, Wanted(parts, boxes, signing, mends))


def read_wanted(store: Store, checkpoint: CheckpointId, wanted: Wanted) -> Proved:
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
            return _read(store, checkpoint, wanted)
        except IntegrityError as error:
            # A damaged near copy is no damage of the checkpoint, as long as there is another.
            if not doubt(store, error.key):
                raise


def _read(store: Store, checkpoint: CheckpointId, wanted: Wanted) -> Proved:
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
        proved = Proved(manifest, _read_all(store, manifest, chunks, places))
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
) -> Proved:
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
