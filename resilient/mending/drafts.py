"""A folder as it would be: pieces of files that are there, and bytes that are new.

Nothing is written. A draft is read like any folder, so what a repair would make is recognised,
judged and proved before the first byte of it exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound
from resilient.storage.folder import Listing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.storage.folder import Folder

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are in a file already.

    Attributes:
        folder: where the file is.
        name: the file.
        start: the first of them.
        size_bytes: how many.
    """

    folder: Folder
    name: str
    start: int
    size_bytes: int

    def read(self, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``, counted from the span's own beginning.

        Raises:
            StoreError: they could not be read.
        """
        length = min(length, self.size_bytes - start)
        return self.folder.read(self.name, self.start + start, length) if length > 0 else b""


Piece = Span | bytes


class Draft:
    """A folder of pieces, to be read like any other.

    Attributes:
        url: where it would be said to be, for what is told by a folder's name.
        changed: the names that are not as they were, those that went away among them.
    """

    def __init__(self, base: Folder, listing: Listing) -> None:
        self.url = base.url
        self.changed: set[str] = set()
        self._files: dict[str, tuple[Piece, ...]] = {
            name: (Span(base, name, 0, size_bytes),) for name, size_bytes in listing.sizes.items()
        }
        self._listing = listing

    def copy(self) -> Draft:
        """Return another one that is the same, to try something with."""
        found = Draft.__new__(Draft)
        found.url, found.changed = self.url, set(self.changed)
        found._files, found._listing = dict(self._files), self._listing  # noqa: SLF001 - its own kind
        return found

    def take(self, other: Draft) -> None:
        """Become what another one is."""
        self.url, self.changed = other.url, set(other.changed)
        self._files = dict(other._files)

    def put(self, name: str, *pieces: Piece) -> None:
        """Say what is in a file."""
        self._files[name] = pieces
        self.changed.add(name)

    def drop(self, name: str) -> None:
        """Leave a file out."""
        self._files.pop(name, None)
        self.changed.add(name)

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Return what a file is made of."""
        return self._files[name]

    def list(self) -> Listing:
        """Return what would be there."""
        sizes = {name: sum(map(size_of, pieces)) for name, pieces in self._files.items()}
        outside = tuple(one for one in self._listing.outside if one not in self.changed)
        return Listing(
            sizes,
            outside,
            self._listing.is_whole,
            self._listing.is_file,
            self._listing.kinds,
        )

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        if name not in self._files:
            raise KeyNotFound(f"no `{name[:200]}` in {self.url}", key=name)
        found, at = [], 0
        for piece in self._files[name]:
            size_bytes = size_of(piece)
            begin = max(start - at, 0)
            if begin < size_bytes and length > 0:
                data = _cut(piece, begin, min(length, size_bytes - begin))
                found.append(data)
                start, length = start + len(data), length - len(data)
            at += size_bytes
        return b"".join(found)

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file, a few at a time.

        Raises:
            StoreError: they could not be read.
        """
        for piece in self._files[name]:
            for at in range(0, size_of(piece), BLOCK_BYTES):
                yield _cut(piece, at, BLOCK_BYTES)

    def renamed(self, name: str) -> None:
        """Say what the folder, or its one file, is called."""
        self.url = str(PurePosixPath(self.url).with_name(name))


def size_of(piece: Piece) -> int:
    """Return how many bytes a piece has."""
    return len(piece) if isinstance(piece, bytes) else piece.size_bytes


def sliced(pieces: tuple[Piece, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of a file from one place to another."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        size_bytes = size_of(piece)
        begin, end = max(start - at, 0), min(stop - at, size_bytes)
        if begin < end:
            whole = begin == 0 and end == size_bytes
            found.append(piece if whole else _part(piece, begin, end))
        at += size_bytes
    return tuple(found)


def _part(piece: Piece, begin: int, end: int) -> Piece:
    if isinstance(piece, bytes):
        return piece[begin:end]
    return Span(piece.folder, piece.name, piece.start + begin, end - begin)


def _cut(piece: Piece, start: int, length: int) -> bytes:
    return piece[start : start + length] if isinstance(piece, bytes) else piece.read(start, length)
