"""Several things at once, in a few threads that end before the call does."""

from __future__ import annotations

import threading
from collections.abc import Sized
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> tuple[Result, ...]:
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
