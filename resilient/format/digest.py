"""Streaming digests of files and chunks, for writing and reading.

Files are cut into chunks of ``CHUNK_BYTES``. Each chunk has an XXH3-128 digest, which locates
damage. The file's digest is the XXH3-128 of the joined chunk digests, so one pass over the bytes
gives both kinds of digest. XXH3 is not cryptographic, so it detects damage but not forgery. The
manifest, the checkpoint's table of contents, is protected by a SHA-256 instead.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

CHUNK_BYTES = 4 << 20
_PIECE_BYTES = 512 << 10
"""Fits in one core's cache while it is digested twice: 40 ms for 343 MiB, 55 ms by chunk."""


def no_progress(size_bytes: int) -> None:
    """Ignore the progress: the default of callers with a progress callback."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Digests of a file's content.

    Attributes:
        size_bytes: Length in bytes.
        digest: 32 hex characters over the chunk digests.
        chunks: 32 hex characters per chunk, in order.
    """

    size_bytes: int
    digest: str
    chunks: tuple[str, ...]


def digest_file(data: bytes | bytearray | memoryview) -> FileDigest:
    """Compute the digests of a whole file's content."""
    view = memoryview(data).cast("B")
    chunks = tuple(
        xxhash.xxh3_128_hexdigest(view[start : start + CHUNK_BYTES])
        for start in range(0, len(view), CHUNK_BYTES)
    )
    return FileDigest(len(view), join_chunks(chunks), chunks)


def digest_with(
    data: bytes | bytearray | memoryview,
    ranges: Sequence[tuple[int, int]],
    on_progress: Callable[[int], None] = no_progress,
) -> tuple[FileDigest, tuple[str, ...]]:
    """Compute the digests of a whole file's content and of ranges of it.

    Both are computed piece by piece, so the bytes come from memory once.

    Args:
        data: Content of the file.
        ranges: (start, stop) inside the content; they do not overlap.
        on_progress: Callback with the length of each digested chunk; it may block.
    """
    view = memoryview(data).cast("B")
    pending_ranges = deque(sorted(enumerate(ranges), key=lambda span: span[1]))
    # The loop below does not reach empty ranges behind the last chunk.
    digests = [digest_bytes(b"")] * len(ranges)
    chunks = []
    running = xxhash.xxh3_128()
    for start in range(0, len(view), CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, len(view))
        chunk = xxhash.xxh3_128()
        for at in range(start, stop, _PIECE_BYTES):
            end = min(at + _PIECE_BYTES, stop)
            chunk.update(view[at:end])
            while pending_ranges and pending_ranges[0][1][0] < end:
                number, (first, last) = pending_ranges[0]
                running.update(view[max(first, at) : min(last, end)])
                if last > end:
                    break
                digests[number] = running.hexdigest()
                running.reset()
                pending_ranges.popleft()
        chunks.append(chunk.hexdigest())
        on_progress(stop - start)
    proof = FileDigest(len(view), join_chunks(tuple(chunks)), tuple(chunks))
    return proof, tuple(digests)


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of one run of bytes: a chunk, or one region of a tensor."""
    return xxhash.xxh3_128_hexdigest(data)


class RunningDigest:
    """Digest of a run of bytes that arrives piece by piece."""

    def __init__(self) -> None:
        self._running = xxhash.xxh3_128()

    def add(self, pieces: Iterable[memoryview]) -> None:
        """Add the next bytes."""
        for piece in pieces:
            self._running.update(piece)

    def take(self) -> str:
        """Return the digest of the bytes since the last call, and start again."""
        digest = self._running.hexdigest()
        self._running.reset()
        return digest


def digest_slowly(data: memoryview, on_progress: Callable[[int], None]) -> str:
    """Return the digest of ``data`` and report each digested piece.

    Args:
        data: Flat bytes.
        on_progress: Callback with the length of each piece; it may block.
    """
    running = xxhash.xxh3_128()
    for start in range(0, len(data), CHUNK_BYTES):
        piece = data[start : start + CHUNK_BYTES]
        running.update(piece)
        on_progress(len(piece))
    return running.hexdigest()


def join_chunks(chunks: tuple[str, ...]) -> str:
    """Return the file's digest from its chunk digests."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(chunk) for chunk in chunks))


def damaged_ranges(
    data: bytes | bytearray | memoryview, expected: FileDigest
) -> list[tuple[int, int]]:
    """Return the byte ranges (start, stop) whose chunks differ from the written chunks.

    A file of another length is also damaged from the first missing or extra byte on.
    """
    file_digest = digest_file(data)
    ranges = [
        (index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, expected.size_bytes))
        for index, chunk in enumerate(expected.chunks)
        if index >= len(file_digest.chunks) or file_digest.chunks[index] != chunk
    ]
    if file_digest.size_bytes > expected.size_bytes:
        ranges.append((expected.size_bytes, file_digest.size_bytes))
    return ranges


def root_digest(data: bytes) -> str:
    """Return the SHA-256 of a document in hex."""
    return hashlib.sha256(data).hexdigest()
