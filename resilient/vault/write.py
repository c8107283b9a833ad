"""Put one rank's files into the store, and prove what was put."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from resilient.format.digest import digest_bytes, digest_file
from resilient.format.manifest import FileEntry, PartEntry, Receipt, TensorEntry
from resilient.format.parity import grouped, protect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.format.names import CheckpointId
    from resilient.format.shard import HostFile
    from resilient.format.thinning import ThinFile
    from resilient.storage.store import Store


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
    entries = tuple(
        _write_file(store, checkpoint, rank, file) for file in chain(files, protect(files, groups))
    )
    tensors = tuple(_prove(tensor, file) for file in files for tensor in file.tensors)
    return Receipt(rank, entries, tensors, tuple(parts), tuple(groups))


def _write_file(
    store: Store, checkpoint: CheckpointId, rank: int, file: HostFile | ThinFile
) -> FileEntry:
    data = file.data
    proof = digest_file(data)
    store.put(checkpoint.key(file.name), data)
    return FileEntry(file.name, proof.size_bytes, proof.digest, proof.chunks, rank)


def _prove(tensor: TensorEntry, file: HostFile | ThinFile) -> TensorEntry:
    """Return the entry with the digest of each region's own bytes, where it is not known yet."""
    if all(one.digest for one in tensor.regions):
        return tensor
    data = memoryview(file.data)
    regions = tuple(
        replace(one, digest=digest_bytes(data[one.start : one.start + one.size_bytes]))
        for one in tensor.regions
    )
    return replace(tensor, regions=regions)
