"""Helpers for transfers of large objects: buffers, reads of ranges, part sizes and threads."""

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
    """Return ``data`` as one flat view of bytes, without a copy.

    Raises:
        StoreError: ``data`` is not a buffer, or its memory is not contiguous.
    """
    try:
        view = memoryview(data)
        # An empty view of several dimensions cannot be cast.
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise StoreError(
            f"cannot put `{key}`: the data is not a contiguous buffer of bytes", key=key
        ) from error


MEMORY_ALIGNMENT = 64
"""Alignment of the memory that torch allocates, in bytes."""
_HUGE_BYTES_MIN = 2 << 20


def new_memory(size_bytes: int, head_bytes: int = 0) -> memoryview:
    """Allocate private memory for a file, in huge pages if the machine has them.

    The first touch of a page costs several times the copy into the page. One huge page replaces
    512 small pages.

    Args:
        size_bytes: Size of the memory.
        head_bytes: Size of the file's header. The byte after the header is aligned to 64 bytes, as
            torch aligns memory.
    """
    padding_bytes = -head_bytes % MEMORY_ALIGNMENT
    if size_bytes < _HUGE_BYTES_MIN:
        return memoryview(bytearray(size_bytes))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, padding_bytes + size_bytes, flags=flags)
    # Some systems lack huge pages, and nothing depends on them.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[padding_bytes:]


class ScatterBuffer:
    """Memory for a run of bytes: one piece, or several pieces at any addresses.

    Args:
        pieces: Flat, writable bytes, in the order of the run.
    """

    def __init__(self, pieces: Iterable[memoryview]) -> None:
        self._pieces = tuple(piece for piece in pieces if len(piece))
        self._stops = tuple(accumulate(map(len, self._pieces)))

    def __len__(self) -> int:
        """Return the length of the run in bytes."""
        return self._stops[-1] if self._stops else 0

    def cut(self, begin: int, stop: int) -> list[memoryview]:
        """Return the memory of bytes ``begin`` to ``stop`` of the run, or up to its end."""
        pieces = []
        for index in range(bisect_right(self._stops, begin), len(self._pieces)):
            piece = self._pieces[index]
            first = self._stops[index] - len(piece)
            if first >= stop:
                break
            pieces.append(piece[max(begin - first, 0) : stop - first])
        return pieces

    def part(self, begin: int, stop: int) -> ScatterBuffer:
        """Return the memory of a part of the run."""
        return ScatterBuffer(self.cut(begin, stop))

    def put(self, begin: int, data: Data) -> None:
        """Copy ``data`` into the run from byte ``begin``; the run must be long enough."""
        view, at = memoryview(data), 0
        for piece in self.cut(begin, begin + len(view)):
            piece[:] = view[at : at + len(piece)]
            at += len(piece)


def check_range(key: str, start: int, length: int) -> None:
    """Reject a range with a negative start or length.

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
    """Part size and concurrency of a transfer: at most ``in_flight * part_bytes`` in flight.

    Attributes:
        part_bytes: Minimum size of a part; an object smaller than two parts is one request.
        in_flight: Number of parts in flight at once.
        are_shared: Whether ``in_flight`` bounds all transfers of a store together.
    """

    part_bytes: int = 16 * _MIB
    in_flight: int = 8
    are_shared: bool = False

    def count_for(self, size_bytes: int) -> int:
        """Return the number of parts of an object: S3 takes at most 10,000 per upload."""
        return min(max(size_bytes // self.part_bytes, 1), _PARTS_MAX)

    def bytes_for(self, size_bytes: int) -> int:
        """Return the part size of an object: equal parts without a small remainder."""
        part_bytes = -(-size_bytes // self.count_for(size_bytes))
        return max(self.part_bytes, part_bytes)


class TransferLimiter:
    """Bound on the parts that all transfers of a store have in flight together.

    Args:
        in_flight: Number of parts.
    """

    def __init__(self, in_flight: int) -> None:
        self._free = in_flight
        # The next file starts before a large file ends, so the connections stay busy at its end.
        self._parts_max = max(in_flight * 3 // 4, 1)
        self._parts_min = max(in_flight // 4, 1)
        self._condition = threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[int]:
        """Wait until some parts are free and yield their number: ``size``, or fewer."""
        size = min(size, self._parts_max)
        with self._condition:
            self._condition.wait_for(lambda: self._free >= min(size, self._parts_min))
            taken_parts = min(size, self._free)
            self._free -= taken_parts
        try:
            yield taken_parts
        finally:
            with self._condition:
                self._free += taken_parts
                self._condition.notify_all()


class SlicedReader:
    """Bytes copied one slice at a time, for clients that accept only ``bytes``."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self._view[where])


def read_in_parts(
    read: Callable[[int, int], Data],
    size_bytes: int,
    parts: MultipartConfig,
    first_bytes: Data = b"",
) -> bytes:
    """Read ``size_bytes`` bytes with ``read(start, length)``, several parts at once.

    Args:
        read: Function that returns a range of the object; called from several threads.
        size_bytes: Length of the object.
        parts: Part size and number of concurrent reads.
        first_bytes: Bytes of the object's beginning that are already read.
    """
    starts = range(len(first_bytes), size_bytes, parts.part_bytes)
    lengths = (min(parts.part_bytes, size_bytes - start) for start in starts)
    with ThreadPoolExecutor(parts.in_flight, thread_name_prefix="resilient-read") as pool:
        return b"".join([first_bytes, *pool.map(read, starts, lengths)])


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_parallel(
    work: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> tuple[Result, ...]:
    """Return ``work(item)`` for every item, in the order of the items.

    The items start in their order, and the calling thread works too. After a failure no further
    item starts. The function waits for all started items, so no work continues after it returns.

    Plain threads are used instead of an executor of the standard library. An executor refuses
    work as soon as the interpreter is about to exit, and a save in flight must still be committed
    then.

    Crash: as ``work``, for any of the items that started.

    Args:
        work: Function called from several threads.
        items: Items to process; a lazy iterable is advanced one item at a time.
        at_once: Maximum concurrency; 1 starts no thread.

    Raises:
        BaseException: The error that ``work`` raised for the first failed item, in their order.
    """
    queue = _WorkQueue(work, items)
    count = min(at_once, len(items)) if isinstance(items, Sized) else at_once
    threads = [
        threading.Thread(target=queue.run, name=f"resilient-lane-{number}")
        for number in range(1, count)
    ]
    started = []
    for thread in threads:
        # A machine without free threads only makes the work slower.
        with suppress(RuntimeError):
            thread.start()
            started.append(thread)
    queue.run()
    for thread in started:
        thread.join()
    if queue.failed:
        raise queue.failed[min(queue.failed)]
    return tuple(queue.done[number] for number in sorted(queue.done))


class _WorkQueue(Generic[Item, Result]):
    """Remaining items, and results and errors by number."""

    def __init__(self, work: Callable[[Item], Result], items: Iterable[Item]) -> None:
        self._work = work
        self._pending = iter(items)
        self._taken_count = 0
        self._lock = threading.Lock()
        self.done: dict[int, Result] = {}
        self.failed: dict[int, BaseException] = {}

    def run(self) -> None:
        """Process items one by one until none is left or one has failed."""
        has_items = True
        while has_items:
            with self._lock:
                number = self._taken_count
                self._taken_count += 1
                item = self._next(number)
            has_items = item is not None
            if item is not None:
                self._process(number, item[0])

    def _next(self, number: int) -> tuple[Item] | None:
        """Return the next item in a tuple, None if there is none; the caller has the lock."""
        try:
            return None if self.failed else (next(self._pending),)
        except StopIteration:
            return None
        except BaseException as error:  # noqa: BLE001 - the caller raises it, in its own thread
            self.failed[number] = error
            return None

    def _process(self, number: int, item: Item) -> None:
        try:
            self.done[number] = self._work(item)
        except BaseException as error:  # noqa: BLE001 - the caller raises it, in its own thread
            self.failed[number] = error


_SHARING_MAX = 8
"""Maximum number of files in flight; each file has its own thread."""

Arrived = Callable[[int, int], None]
"""Callback for each piece that arrived: its start and stop offsets in the buffer.

Pieces arrive in order from the beginning of the buffer. They may start again at the beginning;
then all earlier pieces are void. An exception from this callback ends the read.
"""


@runtime_checkable
class ReadInto(Protocol):
    """A store that fills caller memory without an intermediate copy.

    This is not one of the seven methods of a Store.

    Attributes:
        ranges: Preferred size and concurrency of ranges. Large objects are put in parts of this
            size, with the same concurrency for each object.
    """

    ranges: MultipartConfig

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from offset ``start`` and return the number of bytes read.

        Fewer bytes are read only at the object's end. After an error, the content of ``buffer`` is
        undefined.

        Raises:
            KeyNotFound: The store has no such object.
        """


def read_into(
    store: Store, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived
) -> int:
    """Fill ``buffer`` from any store; a store without ``ReadInto`` costs one copy.

    Args:
        store: Store that has the object.
        key: Key of the object.
        start: Offset in the object, in bytes.
        buffer: Memory for the bytes.
        on_arrival: Callback for each piece.
    """
    if isinstance(store, ReadInto):
        return store.fill(key, start, buffer, on_arrival)
    data = store.get_range(key, start, len(buffer))
    buffer.put(0, data)
    on_arrival(0, len(data))
    return len(data)


def max_ranges(store: Store) -> MultipartConfig:
    """Return the best size of a range of ``store``, and the number of concurrent reads."""
    return store.ranges if isinstance(store, ReadInto) else MultipartConfig(in_flight=4)


def files_at_once(store: Store, size_bytes: int) -> int:
    """Return how many objects of ``size_bytes`` may be in flight to ``store`` at once.

    Together these objects have as many parts as the store wants in flight, or the parts of one
    object. A store that limits its parts itself gets some more objects, so that it always has parts
    to send.
    """
    best = max_ranges(store)
    if best.are_shared:
        return min(max(2 * best.in_flight // best.count_for(size_bytes), 2), _SHARING_MAX)
    return max(best.in_flight // max(-(-size_bytes // best.part_bytes), 1), 1)
