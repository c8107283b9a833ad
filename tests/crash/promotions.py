"""A promotion to the durable tier that takes turns with the next save, as its own thread would.

The library hands promotions to a pool with one thread. Here the pool keeps them until the next
save, which runs beside them; who comes next is drawn, so that a seed makes the same again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.testing.disk_model import ThreadScheduler


class Promise:
    """Work that somebody else does, and its result; to ask for it is a turn."""

    def __init__(self, work: Callable[[], object], turns: ThreadScheduler | None) -> None:
        self._work, self._turns = work, turns
        self.is_begun = self._is_done = False
        self._result: object = None
        self._error: Exception | None = None

    def take(self) -> None:
        """Promise that a thread will run it, so that nobody else does."""
        self.is_begun = True

    def run(self) -> None:
        """Do it; what it dies of, the process dies of."""
        self.is_begun = True
        try:
            self._result = self._work()
        except Exception as error:  # noqa: BLE001 - handed over to who asks for the result
            self._error = error
        finally:
            self._look(ends=True)

    def done(self) -> bool:
        return self._look()

    def exception(self, _seconds: float | None = None) -> Exception | None:
        if not self.is_begun:
            self.run()
        while not self._look():
            pass
        return self._error

    def result(self) -> object:
        error = self.exception()
        if error is not None:
            raise error
        return self._result

    def _look(self, *, ends: bool = False) -> bool:
        if self._turns is None:
            self._is_done = self._is_done or ends
            return self._is_done
        with self._turns.turn():
            self._is_done = self._is_done or ends
            return self._is_done


class Pool:
    """In place of a pool with one thread: at once, or with ``turns`` beside what comes next."""

    def __init__(self, turns: ThreadScheduler | None = None) -> None:
        self._turns = turns
        self._waiting: list[Promise] = []

    def submit(self, work: Callable[..., object], *given: object) -> Promise:
        promise = Promise(lambda: work(*given), self._turns)
        if self._turns is None:
            promise.run()
        else:
            self._waiting.append(promise)
        return promise

    def take(self) -> list[Callable[[], None]]:
        """Return what waits to be done."""
        waiting, self._waiting = [one for one in self._waiting if not one.is_begun], []
        for one in waiting:
            one.take()
        return [one.run for one in waiting]

    def shutdown(self, *, wait: bool) -> None:
        del wait
