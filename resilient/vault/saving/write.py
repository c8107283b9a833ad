"""Put one rank's files into the store, and prove what was put."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from resilient.format.digest import digest_with, nobody
from resilient.format.manifest import FileEntry, PartEntry, Receipt, TensorEntry
from resilient.format.parity import grouped, protect
from resilient.format.shard import StreamedFile
from resilient.format.thinning import ThinFile
from resilient.storage.filling import files_at_once
from resilient.storage.pool import each
from resilient.vault.registry.fenced_put import put_fenced
from resilient.vault.registry.generations import check_fence
from resilient.vault.tiers.tiers import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.format.digest import FileDigest
    from resilient.format.names import CheckpointId
    from resilient.format.shard import Lending
    from resilient.storage.store import Store

SMALL_BYTES = 8 << 20
"""A save that is no larger is written one file after the other: threads would not pay."""

_STREAMED_AT_ONCE_MAX = 4
"""A file without memory has its bytes made for the time that it is written."""


def write(  # noqa: PLR0913 - a save as one rank sees it
    store: Store,
    checkpoint: CheckpointId,
    rank: int,
    files: Sequence[Lending],
    parts: Sequence[PartEntry] = (),
    parity: int = 0,
    *,
    copies_bytes_max: int | None = None,
    told: Callable[[int], None] = nobody,
    token: str = "",
) -> Receipt:
    """Store ``files`` under the checkpoint's folder and return the receipt.

    The names hold the rank and the folder holds the generation. Another process writes the same
    names only in a repository that was restored from a backup; the token of the claim tells.

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
        copies_bytes_max: memory for what is left of thinned files, if it is bounded: of those
            that do not fit together fewer are written at once.
        told: told of each piece's length when it is digested, by several threads, and may take
            its time.
        token: token of the claim that saves; empty compares the number alone.

    Raises:
        Fenced: another claim replaced this one; no committed file was changed.
        StoreError: a file could not be stored; the checkpoint will not be committed.
    """
    groups = grouped([file.name for file in files], rank, parity)
    at_once = _at_once(store, files, copies_bytes_max)
    everything = chain(files, protect(files, groups))
    place, fence = nearest(store), partial(check_fence, store, checkpoint.generation, token)

    def write_one(file: Lending) -> tuple[FileEntry, Sequence[TensorEntry]]:
        with file.lend() as data:
            proof, proved = _prove(file.tensors, data, told)
            put_fenced(place, checkpoint.key(file.name), data, fence)
        return FileEntry(file.name, proof.size_bytes, proof.digest, proof.chunks, rank), proved

    stored = each(write_one, everything, at_once)
    entries = tuple(entry for entry, _ in stored)
    tensors = tuple(tensor for _, proved in stored for tensor in proved)
    return Receipt(rank, entries, tensors, tuple(parts), tuple(groups))


def _at_once(store: Store, files: Sequence[Lending], copies_bytes_max: int | None) -> int:
    """Return how many files may be on their way at once, for the store and for memory."""
    sizes = [file.size_bytes for file in files]
    if sum(sizes) <= SMALL_BYTES:
        return 1
    at_once = files_at_once(store, max(sizes))
    if any(isinstance(file, StreamedFile) for file in files):
        at_once = min(at_once, _STREAMED_AT_ONCE_MAX)
    copied_bytes = max((one.size_bytes for one in files if isinstance(one, ThinFile)), default=0)
    if copied_bytes and copies_bytes_max is not None:
        at_once = min(at_once, copies_bytes_max // copied_bytes)
    return max(at_once, 1)


def _prove(
    tensors: Sequence[TensorEntry], data: bytes | memoryview, told: Callable[[int], None]
) -> tuple[FileDigest, Sequence[TensorEntry]]:
    """Return the proof of a file, and its tensors with the digests of their own bytes.

    Only the digests that are not known yet are taken.
    """
    places = [one for tensor in tensors for one in tensor.regions if not one.digest]
    spans = [(one.start, one.start + one.size_bytes) for one in places]
    proof, digests = digest_with(data, spans, told)
    found = dict(zip(places, digests, strict=True))
    return proof, [
        replace(
            tensor,
            regions=tuple(replace(one, digest=one.digest or found[one]) for one in tensor.regions),
        )
        for tensor in tensors
    ]
