"""Threads that take turns in an order that a seed decides, so that it can be repeated."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from random import Random


class Turns:
    """Decides which of several threads may do its next operation.

    A thread that is not one of them, and one that is alone, never waits.

    Args:
        draw: who comes next.
    """

    def __init__(self, draw: Random) -> None:
        self._draw = draw
        self._changed = threading.Condition()
        self._members: list[int] = []
        self._next = -1
        self._mine = threading.local()

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run each in a thread of its own; return the results, or raise the first's error.

        To end is a turn too: otherwise the order would depend on how soon a thread ends.
        """
        self._members = list(range(len(works)))
        self._next = self._draw.choice(self._members)

        def main(number: int) -> Any:
            self._mine.number = number
            try:
                return works[number]()
            finally:
                self._leave(number)

        with ThreadPoolExecutor(len(works), thread_name_prefix="rank") as pool:
            futures = [pool.submit(main, number) for number in range(len(works))]
        return [future.result() for future in futures]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until this thread comes next; afterwards somebody else may."""
        number = getattr(self._mine, "number", None)
        if number is None:
            yield
            return
        self._await(number)
        try:
            yield
        finally:
            self._pass_on()

    def _await(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._next == number)

    def _pass_on(self) -> None:
        with self._changed:
            self._next = self._draw.choice(self._members) if self._members else -1
            self._changed.notify_all()

    def _leave(self, number: int) -> None:
        self._await(number)
        with self._changed:
            self._members.remove(number)
        self._pass_on()
