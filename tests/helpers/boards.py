"""A board on which a deadline passes when a test says so, and not by the clock."""

from __future__ import annotations

import threading
from queue import Queue

PATIENT_SECONDS = 20.0


class Timed:
    """A board for any threads, whose waits for one key last as long as a test says.

    Args:
        board: the board.
        last: how the key ends that one thread waits for.
    """

    def __init__(self, kv_store, last) -> None:
        self._board, self._last = kv_store, last
        self._seconds, self._came = Queue(), threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._board, name)

    def another(self):
        return self

    def wait(self, keys, within_seconds):
        if not keys[-1].endswith(self._last):
            return self._board.wait(keys, within_seconds)
        self._came.release()
        return self._board.wait(keys, self._seconds.get(timeout=PATIENT_SECONDS))

    def post(self, key, value) -> None:
        self._board.post(key, value)
        if key.endswith(self._last):
            self.be_patient()

    def be_patient(self) -> None:
        """Let the wait last until it is answered."""
        self._seconds.put(PATIENT_SECONDS)

    def let_a_deadline_pass(self, *, is_last=False) -> None:
        """Let the wait end in vain, and return when the same thread waits again.

        Args:
            is_last: it will not.
        """
        assert self._came.acquire(timeout=PATIENT_SECONDS)
        self._seconds.put(0.05)
        if not is_last:
            assert self._came.acquire(timeout=PATIENT_SECONDS)
            self._came.release()
