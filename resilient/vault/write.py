"""Put one rank's files into the store, and prove what was put."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from resilient.format.digest import digest_file, digest_with
from resilient.format.manifest import FileEntry, PartEntry, Receipt, TensorEntry
from resilient.format.parity import grouped, protect
from resilient.storage.filling import files_at_once
from resilient.vault.pool import each

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.digest import FileDigest
    from resilient.format.names import CheckpointId
    from resilient.format.shard import HostFile
    from resilient.format.thinning import ThinFile
    from resilient.storage.store import Store

SMALL_BYTES = 8 << 20
"""A save that is no larger is written one file after the other: threads would not pay."""


def write(
    store: Store,
    checkpoint: CheckpointId,
    rank: int,
    files: Sequence[HostFile | ThinFile],
    parts: Sequence[PartEntry] = (),
    parity: int = 0,
) -> Receipt:
    """Store ``files`` under the checkpoint's folder and return the receipt.

    The names hold the rank and the folder holds the generation, so no other process writes them.

    Several large files are written at once; the receipt names them in the order given. What fails
    first ends the writing: no more files are begun, and those on their way are waited for.

    Crash: some files may be there; without a manifest the checkpoint does not exist.

    Args:
        store: where to.
        checkpoint: whose folder.
        rank: who writes; recorded with each file.
        files: host memory that nobody changes meanwhile.
        parts: the parts whose documents are among ``files``.
        parity: how many of these files may be lost later and be computed back; each costs as
            many bytes as the longest, in the store and, meanwhile, in memory.

    Raises:
        StoreError: a file could not be stored; the checkpoint will not be committed.
    """
    groups = grouped([file.name for file in files], rank, parity)
    sizes = [file.size_bytes for file in files]
    at_once = files_at_once(store, max(sizes, default=0)) if sum(sizes) > SMALL_BYTES else 1
    everything = chain(files, protect(files, groups))
    stored = each(lambda file: _write_file(store, checkpoint, rank, file), everything, at_once)
    entries = tuple(entry for entry, _ in stored)
    tensors = tuple(tensor for _, proved in stored for tensor in proved)
    return Receipt(rank, entries, tensors, tuple(parts), tuple(groups))


def _write_file(
    store: Store, checkpoint: CheckpointId, rank: int, file: HostFile | ThinFile
) -> tuple[FileEntry, Sequence[TensorEntry]]:
    """Take every digest of a file's content that is not known yet, and store it."""
    data = file.data
    proof, tensors = _prove(file.tensors, data)
    store.put(checkpoint.key(file.name), data)
    return FileEntry(file.name, proof.size_bytes, proof.digest, proof.chunks, rank), tensors


def _prove(
    tensors: Sequence[TensorEntry], data: bytes | memoryview
) -> tuple[FileDigest, Sequence[TensorEntry]]:
    """Return the proof of a file, and its tensors with the digests of their own bytes."""
    places = [one for tensor in tensors for one in tensor.regions if not one.digest]
    if not places:
        return digest_file(data), tensors
    proof, digests = digest_with(data, [(one.start, one.start + one.size_bytes) for one in places])
    found = dict(zip(places, digests, strict=True))
    return proof, [
        replace(
            tensor,
            regions=tuple(replace(one, digest=one.digest or found[one]) for one in tensor.regions),
        )
        for tensor in tensors
    ]
