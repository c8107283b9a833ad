"""Large objects in parts: how large, how many at once, and how they are sliced and joined."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.storage.store import Data

_PARTS_MAX = 10_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """The back-pressure of one transfer: at most ``in_flight * part_bytes`` are on their way.

    Attributes:
        part_bytes: least size of one part; an object that has no two of them is one request.
        in_flight: parts that are on their way at once.
        are_shared: whether all transfers of a store together have no more on their way.
    """

    part_bytes: int = 16 * _MIB
    in_flight: int = 8
    are_shared: bool = False

    def count_for(self, size_bytes: int) -> int:
        """Return the number of parts of an object: S3 takes at most 10,000 of one upload."""
        return min(max(size_bytes // self.part_bytes, 1), _PARTS_MAX)

    def bytes_for(self, size_bytes: int) -> int:
        """Return the part size for an object: parts of equal size, none of them a small rest."""
        each = -(-size_bytes // self.count_for(size_bytes))
        return max(self.part_bytes, each)


class Lanes:
    """What all transfers of a store together may have on their way.

    Args:
        in_flight: parts.
    """

    def __init__(self, in_flight: int) -> None:
        self._free = in_flight
        # The next file begins before a large one has ended, so that nothing idles at its end.
        self._most = max(in_flight * 3 // 4, 1)
        self._least = max(in_flight // 4, 1)
        self._changed = threading.Condition()

    @contextmanager
    def take(self, wanted: int) -> Iterator[int]:
        """Wait until some parts may go, and give how many: ``wanted``, or fewer."""
        wanted = min(wanted, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= min(wanted, self._least))
            taken = min(wanted, self._free)
            self._free -= taken
        try:
            yield taken
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


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
