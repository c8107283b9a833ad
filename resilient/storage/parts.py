"""Large objects in parts: how large, how many at once, and how they are sliced and joined."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.storage.store import Data

_PARTS_MAX = 10_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """The back-pressure of one transfer: at most ``in_flight * part_bytes`` are on their way.

    Attributes:
        part_bytes: size of one part; an object that fits in one is one request.
        in_flight: parts that are on their way at once.
    """

    part_bytes: int = 16 * _MIB
    in_flight: int = 8

    def bytes_for(self, size_bytes: int) -> int:
        """Return the part size for an object: S3 takes at most 10,000 parts of one upload."""
        least = -(-size_bytes // _PARTS_MAX)
        return max(self.part_bytes, -(-least // _MIB) * _MIB)


class Pieces:
    """Bytes that are copied only a slice at a time, for clients that take ``bytes`` alone."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self._view[where])


def read_in_parts(
    read: Callable[[int, int], Data], size_bytes: int, parts: Parts, began: Data = b""
) -> bytes:
    """Return ``size_bytes`` bytes that ``read(start, length)`` gives, several parts at once.

    Args:
        read: returns a range of the object; called from several threads.
        size_bytes: length of the object.
        parts: how large and how many.
        began: what was read of its beginning already.
    """
    starts = range(len(began), size_bytes, parts.part_bytes)
    lengths = (min(parts.part_bytes, size_bytes - start) for start in starts)
    with ThreadPoolExecutor(parts.in_flight, thread_name_prefix="resilient-read") as pool:
        return b"".join([began, *pool.map(read, starts, lengths)])
