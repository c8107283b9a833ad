"""Memory of this process, and the cost of its first touch paid early."""

from __future__ import annotations

import mmap
from contextlib import suppress

# Linux 5.14; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23
_STRIDE_BYTES = 1 << 20


def private(size_bytes: int) -> memoryview:
    """Return zeros that only this process sees, in huge pages where the machine gives them."""
    if size_bytes == 0:
        return memoryview(bytearray())
    mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    keep_from_children(mapped)
    return memoryview(mapped)


def keep_from_children(mapped: mmap.mmap) -> None:
    """Leave memory out of the processes that are forked from this one, such as a loader's.

    Else each fork shares its pages until they are written to: the next copy into it takes a fault
    per page, ten times as long as a warm one, and as much memory again while the child lives. A
    child has no use for it: the threads that persist are not there.
    """
    with suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_DONTFORK)


class PrivateBuffers:
    """Private memory by name, the same as last time where it is long enough."""

    def __init__(self) -> None:
        self._held: dict[str, memoryview] = {}

    def get(self, name: str, size_bytes: int) -> memoryview:
        """Return at least ``size_bytes`` of memory."""
        held = self._held.get(name)
        if held is None or len(held) < size_bytes:
            held = self._held[name] = private(size_bytes)
        return held


def touch(memory: memoryview) -> None:
    """Have every page of fresh memory there, so that whoever writes first does not wait for it.

    Args:
        memory: writable; nobody needs what is in it.
    """
    mapped = memory.obj
    if isinstance(mapped, mmap.mmap):
        with suppress(OSError):
            mapped.madvise(_MADV_POPULATE_WRITE)
            return
    zeros = bytes(_STRIDE_BYTES)
    for start in range(0, len(memory), _STRIDE_BYTES):
        piece = memory[start : start + _STRIDE_BYTES]
        piece[:] = zeros[: len(piece)]
