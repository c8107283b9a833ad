"""A file of the machine that is being written, past the page cache where that can be."""

from __future__ import annotations

import errno
import fcntl
import os

_BLOCK_BYTES = 4096
"""Of this size, or a divisor of it, are the blocks of disks, and memory's pages a multiple."""
_PIECE_BYTES = 16 << 20
_DIRECT_BYTES_MIN = 1 << 20
_NOT_DIRECTLY = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_DIRECT = getattr(os, "O_DIRECT", 0)


class PosixHandle:
    """A file descriptor open for writing.

    Large pieces go to the disk straight from the caller's memory: nothing is copied, the disk
    starts at once and not when a sync asks for it, and training's files stay in the page cache,
    where a checkpoint would not be read again. A file system or memory that cannot have that is
    written through the page cache. ``sync`` is as needed either way.

    Args:
        descriptor: of an empty file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._may_be_direct = bool(_DIRECT)
        self._is_direct = False
        self._at = 0

    def write(self, data: memoryview) -> int:
        """Call ``write(2)`` with a first part of ``data``."""
        written = self._write_directly(data) or self._write_through_cache(data)
        self._at += written
        return written

    def sync(self) -> None:
        """Call ``fsync(2)`` on the descriptor that wrote, the one sure to be told of an error."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Call ``close(2)``."""
        os.close(self._descriptor)

    def _write_directly(self, data: memoryview) -> int:
        """Write whole blocks past the page cache; return how many bytes, 0 if that cannot be."""
        may_be = self._may_be_direct and not self._at % _BLOCK_BYTES
        if not may_be or len(data) < _DIRECT_BYTES_MIN:
            return 0
        size_bytes = min(len(data), _PIECE_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            self._switch(direct=True)
            return os.write(self._descriptor, data[:size_bytes])
        except OSError as error:
            if error.errno not in _NOT_DIRECTLY:
                raise
            self._may_be_direct = False
            return 0

    def _write_through_cache(self, data: memoryview) -> int:
        self._switch(direct=False)
        return os.write(self._descriptor, data)

    def _switch(self, *, direct: bool) -> None:
        if direct == self._is_direct:
            return
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        wanted = flags | _DIRECT if direct else flags & ~_DIRECT
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, wanted)
        self._is_direct = direct
