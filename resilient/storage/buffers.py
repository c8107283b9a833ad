"""What a caller hands to a store, checked once and in one way."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from resilient.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.storage.store import Data


def byte_view(data: Data, key: str = "") -> memoryview:
    """Return ``data`` as one flat view of bytes, copying nothing.

    Raises:
        StoreError: the buffer has gaps, or is not one.
    """
    try:
        view = memoryview(data)
        # An empty view of several dimensions cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise StoreError(
            f"cannot put `{key}`: the data is no contiguous buffer of bytes", key=key
        ) from error


MEMORY_ALIGNMENT = 64
"""Of what torch allocates, in bytes."""
_HUGE_BYTES_MIN = 2 << 20


def new_memory(size_bytes: int, head_bytes: int = 0) -> memoryview:
    """Return memory of our own for a file, in large pages where the machine has them.

    The first touch of a page costs several times the copy into it, and one large page stands
    for 512 small ones.

    Args:
        size_bytes: how much.
        head_bytes: what stands behind so many bytes begins at a multiple of 64, as memory of
            torch does.
    """
    before = -head_bytes % MEMORY_ALIGNMENT
    if size_bytes < _HUGE_BYTES_MIN:
        return memoryview(bytearray(size_bytes))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, before + size_bytes, flags=flags)
    # Not every system has it, and nothing depends on it.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[before:]


class Room:
    """Memory for a run of bytes: one piece, or several that lie anywhere.

    Args:
        pieces: flat, writable bytes, in the order of the run.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = tuple(piece for piece in pieces if len(piece))
        self._stops = tuple(accumulate(map(len, self._pieces)))

    def __len__(self) -> int:
        """Return how many bytes the run has."""
        return self._stops[-1] if self._stops else 0

    def cut(self, begin: int, stop: int) -> list[memoryview]:
        """Return the memory of the bytes from ``begin`` to ``stop`` of the run, or to its end."""
        found = []
        for index in range(bisect_right(self._stops, begin), len(self._pieces)):
            piece = self._pieces[index]
            first = self._stops[index] - len(piece)
            if first >= stop:
                break
            found.append(piece[max(begin - first, 0) : stop - first])
        return found

    def part(self, begin: int, stop: int) -> Room:
        """Return the room of a part of the run."""
        return Room(self.cut(begin, stop))

    def put(self, begin: int, data: Data) -> None:
        """Copy ``data`` to the bytes from ``begin`` on; there must be so many."""
        view, at = memoryview(data), 0
        for piece in self.cut(begin, begin + len(view)):
            piece[:] = view[at : at + len(piece)]
            at += len(piece)


def check_range(key: str, start: int, length: int) -> None:
    """Refuse a range that begins or ends before it starts.

    Raises:
        StoreError: ``start`` or ``length`` is negative.
    """
    if start < 0 or length < 0:
        raise StoreError(
            f"cannot read `{key}`: the range of {length} bytes from {start} is negative", key=key
        )
