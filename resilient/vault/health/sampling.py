"""Read some of what was committed, chosen at random, and hold it against its digests.

Whoever reads a share each night has seen nearly everything within a year, at a share of the cost.
What is chosen are chunks, not files: of a terabyte in few files a share is a share. A chunk that
several checkpoints need is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound
from resilient.format.digest import CHUNK_BYTES, digest_bytes
from resilient.showing import quoted
from resilient.vault.access.damage import join_names
from resilient.vault.health.verify import MISSING, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store


@dataclass(slots=True)
class Sample:
    """What was read, and what was wrong with it.

    Attributes:
        chunks: how many were read.
        of: how many there are.
        size_bytes: of those that were read.
        findings: of each checkpoint that was looked at.
    """

    chunks: int = 0
    of: int = 0
    size_bytes: int = 0
    findings: dict[CheckpointId, list[Finding]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a stored file, and the checkpoints that need it."""

    entry: FileEntry
    number: int
    manifests: list[Manifest]

    @property
    def start(self) -> int:
        return self.number * CHUNK_BYTES

    @property
    def size_bytes(self) -> int:
        return min(CHUNK_BYTES, self.entry.size_bytes - self.start)


def read_sample(
    store: Store,
    manifests: Sequence[Manifest],
    share: float,
    random: Random,
    goes_on: Callable[[int, int], bool],
) -> Sample:
    """Read a share of all chunks, in random order, until they are done or the time is.

    Crash: reads only.

    Args:
        store: the repository.
        manifests: of the checkpoints to look at.
        share: of the chunks, rounded up: at least one is read where there is one.
        random: chooses.
        goes_on: told of the bytes that are done and of all that were chosen; whether to go on.

    Raises:
        StoreError: the store failed, which says nothing about the checkpoints.
    """
    chunks = _chunks(manifests)
    wanted = -(-len(chunks) * share // 1)
    chosen = random.sample(chunks, min(len(chunks), int(wanted)))
    of_bytes = sum(one.size_bytes for one in chosen)
    found = Sample(of=len(chunks), findings={one.checkpoint: [] for one in manifests})
    for chunk in chosen:
        if not goes_on(found.size_bytes, of_bytes):
            break
        problem = _problem(store, chunk)
        found.chunks += 1
        found.size_bytes += chunk.size_bytes
        for manifest in chunk.manifests if problem else ():
            found.findings[manifest.checkpoint].append(_finding(store, manifest, chunk, problem))
    return found


def _chunks(manifests: Sequence[Manifest]) -> list[_Chunk]:
    found: dict[tuple[str, int], _Chunk] = {}
    for manifest in manifests:
        for entry in manifest.files:
            for number in range(len(entry.chunks)):
                key = manifest.key(entry.name), number
                found.setdefault(key, _Chunk(entry, number, [])).manifests.append(manifest)
    return list(found.values())


def _problem(store: Store, chunk: _Chunk) -> str:
    key = chunk.manifests[0].key(chunk.entry.name)
    # Once more, as in vault/access/fetch.py: it may have happened on the way.
    for _ in range(2):
        try:
            data = store.get_range(key, chunk.start, chunk.size_bytes)
        except KeyNotFound:
            return MISSING
        if digest_bytes(data) == chunk.entry.chunks[chunk.number]:
            return ""
    return "content is not what was committed"


def _finding(store: Store, manifest: Manifest, chunk: _Chunk, problem: str) -> Finding:
    start, stop = chunk.start, chunk.start + chunk.size_bytes
    # Several chunks can be damaged and only some were read: what mends it all is not known here.
    name = next(
        one.name
        for one in manifest.files
        if manifest.key(one.name) == chunk.manifests[0].key(chunk.entry.name)
    )
    hit = dict.fromkeys(
        tensor.name
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == name and one.start < stop and start < one.start + one.size_bytes
    )
    return Finding(
        name,
        join_names(list(hit)),
        problem,
        "damaged" if name in manifest.needed else "warning",
        start,
        stop,
        f"resilient ckpt verify {manifest.checkpoint} {quoted(store.url)}",
    )
