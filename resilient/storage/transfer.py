"""Buffers, ranged reads into caller memory, multipart sizing, thread pool.

What a caller hands to a store, checked once and in one way.

Large objects in parts: how large, how many at once, and how they are sliced and joined.

Several things at once, in a few threads that end before the call does.

Ranges of an object straight into memory that the reader owns: what some stores can do.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, runtime_checkable

from resilient.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.storage.store import Data, Store


def as_byte_view(data: Data, key: str = "") -> memoryview:
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


class ScatterBuffer:
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

    def part(self, begin: int, stop: int) -> ScatterBuffer:
        """Return the room of a part of the run."""
        return ScatterBuffer(self.cut(begin, stop))

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


_PARTS_MAX = 10_000
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MultipartConfig:
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


class TransferLimiter:
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


class SlicedReader:
    """Bytes that are copied only a slice at a time, for clients that take ``bytes`` alone."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self._view[where])


def read_in_parts(
    read: Callable[[int, int], Data], size_bytes: int, parts: MultipartConfig, began: Data = b""
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


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_parallel(
    work: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> tuple[Result, ...]:
    """Return ``work(item)`` for every item, in the order of the items.

    The items are begun in their order, and the calling thread works too. After a failure no more
    are begun; those that were are waited for, so nothing goes on when this has returned.

    Plain threads, and not an executor of the standard library: that one refuses work as soon as
    the interpreter is about to end, and a save in flight lands even then.

    Crash: as ``work``, for any of the items that were begun.

    Args:
        work: called from several threads.
        items: what to work on; made one at a time, if they are made.
        at_once: how many at most; 1 starts no thread.

    Raises:
        BaseException: what ``work`` raised for the first item, in their order, that failed.
    """
    lanes = _Lanes(work, items)
    count = min(at_once, len(items)) if isinstance(items, Sized) else at_once
    others = [
        threading.Thread(target=lanes.run, name=f"resilient-lane-{number}")
        for number in range(1, count)
    ]
    started = []
    for thread in others:
        # A machine that gives no more threads only makes it slower.
        with suppress(RuntimeError):
            thread.start()
            started.append(thread)
    lanes.run()
    for thread in started:
        thread.join()
    if lanes.failed:
        raise lanes.failed[min(lanes.failed)]
    return tuple(lanes.done[number] for number in sorted(lanes.done))


class _Lanes(Generic[Item, Result]):
    """What is left to do, and what came of the rest, by number."""

    def __init__(self, work: Callable[[Item], Result], items: Iterable[Item]) -> None:
        self._work = work
        self._left = iter(items)
        self._taken = 0
        self._lock = threading.Lock()
        self.done: dict[int, Result] = {}
        self.failed: dict[int, BaseException] = {}

    def run(self) -> None:
        """Take one item after the other until none is left, or one has failed."""
        is_left = True
        while is_left:
            with self._lock:
                number = self._taken
                self._taken += 1
                item = self._next(number)
            is_left = item is not None
            if item is not None:
                self._do(number, item[0])

    def _next(self, number: int) -> tuple[Item] | None:
        """Return the next item in a tuple, None when there is none; the lock is held."""
        try:
            return None if self.failed else (next(self._left),)
        except StopIteration:
            return None
        except BaseException as error:  # noqa: BLE001 - the caller raises it, in its own thread
            self.failed[number] = error
            return None

    def _do(self, number: int, item: Item) -> None:
        try:
            self.done[number] = self._work(item)
        except BaseException as error:  # noqa: BLE001 - the caller raises it, in its own thread
            self.failed[number] = error


_SHARING_MAX = 8
"""A thread for each."""

Arrived = Callable[[int, int], None]
"""Told of each piece, as soon as it is there, where in the room it begins and stops.

Pieces come one behind the other from the room's beginning. They may begin anew; then what was
there before counts for nothing. What this raises ends the filling.
"""


@runtime_checkable
class ReadInto(Protocol):
    """A store that fills memory without a copy between. Not a part of the seven verbs of a Store.

    Attributes:
        ranges: how large a range it likes, and how many at once; in parts of this size it puts
            large objects, so many at once of each.
    """

    ranges: MultipartConfig

    def fill(self, key: str, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
        """Fill ``room`` from offset ``start`` and return how many bytes came.

        Fewer come only at the object's end. When it raises, ``room`` may hold anything.

        Raises:
            KeyNotFound: no such object.
        """


def read_into(store: Store, key: str, start: int, room: ScatterBuffer, arrived: Arrived) -> int:
    """Fill ``room`` from any store; one that cannot do it costs a copy.

    Args:
        store: where the object is.
        key: its key.
        start: offset in it, bytes.
        room: memory for what is wanted.
        arrived: told of each piece.
    """
    if isinstance(store, ReadInto):
        return store.fill(key, start, room, arrived)
    data = store.get_range(key, start, len(room))
    room.put(0, data)
    arrived(0, len(data))
    return len(data)


def max_ranges(store: Store) -> MultipartConfig:
    """Return how large ranges of ``store`` are best read, and how many at once."""
    return store.ranges if isinstance(store, ReadInto) else MultipartConfig(in_flight=4)


def files_at_once(store: Store, size_bytes: int) -> int:
    """Return how many objects of ``size_bytes`` may be on their way to ``store`` at once.

    Their parts together are as many as the store wants on their way, or those of one object. A
    store that bounds them by itself is given some more files, so that it always has parts to send.
    """
    best = max_ranges(store)
    if best.are_shared:
        return min(max(2 * best.in_flight // best.count_for(size_bytes), 2), _SHARING_MAX)
    return max(best.in_flight // max(-(-size_bytes // best.part_bytes), 1), 1)
