"""Verified reconstruction of damaged chunks, from parity or from other copies.

Parity is redundant data that a save stores beside the files. A chunk is the smallest part of a file
with its own digest. Damage is therefore located chunk by chunk, and a reconstructed chunk is
verified like any other chunk. This module writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import CHUNK_BYTES, digest_bytes, digest_file
from resilient.format.parity import add, coefficient, solve
from resilient.format.partial_read import PartialFile, runs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.format.parity import ParityGroup
    from resilient.format.partial_read import Content


class ChunkSource(Protocol):
    """Source of chunks of a checkpoint's files, under their keys."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return bytes of an object; fewer only at its end.

        Raises:
            KeyNotFound: The source does not have the object.
            StoreError: The object could not be read.
        """


def groups_of(manifest: Manifest, name: str) -> list[ParityGroup]:
    """Return the groups that protect a file; several if ranks reference the same file."""
    return [group for group in manifest.parity if name in group.shares]


def can_reconstruct(manifest: Manifest, name: str, damaged: Mapping[str, Collection[int]]) -> bool:
    """Return whether parity can restore all of a file's damage.

    Args:
        manifest: Manifest.
        name: Name of the file.
        damaged: Numbers of damaged chunks by name of every damaged file. A listed file without
            damaged chunks only has a wrong length; its own bytes suffice to repair it.
    """
    groups = groups_of(manifest, name)
    return name in damaged and all(
        any(_is_enough(group, damaged, number) for group in groups) for number in damaged[name]
    )


def _is_enough(group: ParityGroup, damaged: Mapping[str, Collection[int]], number: int) -> bool:
    damaged_shares = sum(number in damaged.get(share, ()) for share in group.shares)
    return damaged_shares <= len(group.parity)


@dataclass(frozen=True, slots=True)
class ReconstructedFile:
    """Verified bytes of a file.

    Attributes:
        content: Whole file, or the wanted chunks.
        is_computed: Whether a chunk was intact in no place, and was computed from parity.
    """

    content: Content
    is_computed: bool


def reconstruct(
    places: Sequence[ChunkSource], manifest: Manifest, entry: FileEntry, chunks: Collection[int]
) -> ReconstructedFile:
    """Return verified chunks of a file: read, copied from another place, or reconstructed.

    Memory use is the result, a copy of the result, and a few more chunks than the group has parity
    files.

    Args:
        places: Repository, then others that may have the same checkpoint.
        manifest: Manifest, whose digests verify bytes from any source.
        entry: Entry of the file.
        chunks: Numbers of the wanted chunks; all of them give the whole file.

    Raises:
        IntegrityError: More is damaged than parity and the other places can restore.
        StoreError: A store failed, so the state of the checkpoint is unknown.
    """
    starts, parts, is_computed = [], [], False
    for first, count in runs(chunks):
        start = first * CHUNK_BYTES
        part = bytearray(min(count * CHUNK_BYTES, entry.size_bytes - start))
        for number in range(first, first + count):
            at = (number - first) * CHUNK_BYTES
            chunk = find_chunk(places, manifest, entry, number)
            is_computed = is_computed or chunk is None
            part[at : at + CHUNK_BYTES] = (
                _computed(places, manifest, entry, number) if chunk is None else chunk
            )
        starts.append(start)
        parts.append(bytes(part))
    if len(chunks) == len(entry.chunks):
        return ReconstructedFile(parts[0] if parts else b"", is_computed)
    return ReconstructedFile(PartialFile(tuple(starts), tuple(parts)), is_computed)


def reconstruct_file(places: Sequence[ChunkSource], manifest: Manifest, entry: FileEntry) -> bytes:
    """Return a whole file, verified by its digest.

    Args:
        places: As for :func:`reconstruct`.
        manifest: As for :func:`reconstruct`.
        entry: Entry of the file.

    Raises:
        IntegrityError: More is damaged than parity and the other places can restore.
        StoreError: A store failed, so the state of the checkpoint is unknown.
    """
    data = reconstruct(places, manifest, entry, range(len(entry.chunks))).content
    assert isinstance(data, bytes), "all chunks are a whole file"  # noqa: S101
    if digest_file(data) != entry.proof:
        raise IntegrityError(
            f"`{entry.name}`: the reconstructed file differs from what was committed"
        )
    return data


def find_chunk(
    places: Sequence[ChunkSource], manifest: Manifest, entry: FileEntry, number: int
) -> bytes | None:
    """Return a chunk from the first place where the chunk is intact; None if there is none.

    Args:
        places: As for :func:`reconstruct`.
        manifest: As for :func:`reconstruct`.
        entry: Entry of the file.
        number: Number of the chunk.

    Raises:
        StoreError: A store failed, so the state of the checkpoint is unknown.
    """
    key, start = manifest.key(entry.name), number * CHUNK_BYTES
    length = min(CHUNK_BYTES, entry.size_bytes - start)
    for store in places:
        # Read twice, as in `checkpoint/verified_read.py`: a bit may have flipped on the way.
        for _ in range(2):
            try:
                data = store.get_range(key, start, length)
            except KeyNotFound:
                break
            if len(data) == length and digest_bytes(data) == entry.chunks[number]:
                return data
    return None


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of a group's parity rows over the files that are whole at one chunk's place.

    Attributes:
        group: Parity group.
        rows: One sum per parity row.
        lost: Columns of the files that are not whole there.
    """

    group: ParityGroup
    rows: tuple[bytearray, ...]
    lost: tuple[int, ...]


def _computed(
    places: Sequence[ChunkSource], manifest: Manifest, entry: FileEntry, number: int
) -> memoryview:
    key = manifest.key(entry.name)
    refusal = IntegrityError(f"`{key}` is damaged, and no parity protects it", key=key)
    for group in groups_of(manifest, entry.name):
        sums = _sum_up(places, manifest, group, number, without=entry.name)
        try:
            content = _solved(places, manifest, entry, number, sums)
        except IntegrityError as error:
            refusal = error
            continue
        result = memoryview(content)[: entry.size_bytes - number * CHUNK_BYTES]
        if digest_bytes(result) == entry.chunks[number]:
            return result
        refusal = IntegrityError(
            f"`{key}`: parity reconstructs other bytes than were committed", key=key
        )
    raise refusal


def _sum_up(
    places: Sequence[ChunkSource],
    manifest: Manifest,
    group: ParityGroup,
    number: int,
    *,
    without: str,
) -> _Sums:
    """Read every protected file of a group but one at one chunk's place, once."""
    longest = manifest.file(group.parity[0]).size_bytes
    length = min(CHUNK_BYTES, longest - number * CHUNK_BYTES)
    sums = tuple(bytearray(length) for _ in group.parity)
    lost_columns = []
    for column, name in enumerate(group.files):
        entry = manifest.file(name)
        if number >= len(entry.chunks):
            continue
        data = find_chunk(places, manifest, entry, number) if name != without else None
        if data is None:
            lost_columns.append(column)
            continue
        for row, total in enumerate(sums):
            add(total, [(coefficient(row, column), data)])
    return _Sums(group, sums, tuple(lost_columns))


def _solved(
    places: Sequence[ChunkSource], manifest: Manifest, entry: FileEntry, number: int, sums: _Sums
) -> bytearray:
    """Return a share of the group at one chunk's place: a lost file, or a parity row."""
    group = sums.group
    rows: list[int] = []
    for row, name in enumerate(group.parity):
        if len(rows) == len(sums.lost):
            break
        data = (
            find_chunk(places, manifest, manifest.file(name), number)
            if name != entry.name
            else None
        )
        if data is not None:
            add(sums.rows[row], [(1, data)])
            rows.append(row)
    if len(rows) < len(sums.lost):
        raise _too_much(manifest, entry, number, sums, len(rows))
    files = _files(sums, rows)
    if entry.name in group.files:
        return files[group.files.index(entry.name)]
    own_row = group.parity.index(entry.name)
    add(
        sums.rows[own_row], [(coefficient(own_row, column), data) for column, data in files.items()]
    )
    return sums.rows[own_row]


def _files(sums: _Sums, rows: Sequence[int]) -> dict[int, bytearray]:
    """Return the lost files' bytes by column."""
    files = {}
    for column, factors in zip(sums.lost, solve(sums.lost, rows), strict=True):
        content = bytearray(len(sums.rows[0]))
        add(
            content,
            [(factor, sums.rows[row]) for factor, row in zip(factors, rows, strict=True)],
        )
        files[column] = content
    return files


def _too_much(
    manifest: Manifest, entry: FileEntry, number: int, sums: _Sums, parity: int
) -> IntegrityError:
    key, start = manifest.key(entry.name), number * CHUNK_BYTES
    names = ", ".join(sums.group.files[column] for column in sums.lost)
    return IntegrityError(
        f"`{key}`: too much is damaged to reconstruct it: between bytes {start} and "
        f"{min(start + CHUNK_BYTES, entry.size_bytes)} of {names or 'parity alone'}, and {parity} "
        f"of {len(sums.group.parity)} parity files are intact there",
        key=key,
    )
