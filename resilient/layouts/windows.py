"""Files of a folder as what ``zipfile`` can read: ranges on demand, bounded, with a memory."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.storage.folder import Folder

READ_MAX = 16 << 20
"""One answer; the directory of a zip with 100,000 members has 10 MB."""
_AHEAD_BYTES = 64 << 10


class Window(io.RawIOBase):
    """A part of a file, for reading; remembers the last bytes it asked for.

    Args:
        folder: where the file is.
        name: its name.
        start: where the part begins in it.
        size_bytes: how long the part is.
    """

    def __init__(self, folder: Folder, name: str, start: int, size_bytes: int) -> None:
        super().__init__()
        self._folder, self._name = folder, name
        self._start, self._size = start, size_bytes
        self._at = 0
        self._kept, self._kept_at = b"", 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def seekable(self) -> bool:
        """Say yes."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes or all that are left, of more than 16 MiB the first.

        ``zipfile`` asks again for the rest of a member. A directory it takes in one piece, so one
        that is larger counts as cut short.
        """
        left = max(0, self._size - self._at)
        size = min(left if size < 0 else size, left, READ_MAX)
        if not self._at >= self._kept_at or self._at + size > self._kept_at + len(self._kept):
            # From the tail on backwards is how zips are read, so what is near the end comes whole.
            begin = self._at if left > _AHEAD_BYTES else max(0, self._size - _AHEAD_BYTES)
            length = min(max(size, _AHEAD_BYTES), self._size - begin)
            length = max(length, self._at + size - begin)
            self._kept = self._folder.read(self._name, self._start + begin, length)
            self._kept_at = begin
        offset = self._at - self._kept_at
        found = self._kept[offset : offset + size]
        self._at += len(found)
        return found
