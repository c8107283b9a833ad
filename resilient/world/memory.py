"""A Board in memory: for a world of one, and for ranks that are threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from resilient.world.serving import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.errors import PeerFailed


class MemoryBoard:
    """A Board for threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._gone: PeerFailed | None = None
        self._changed = threading.Condition()

    def post(self, key: str, value: bytes) -> None:
        """Set ``key`` and wake whoever waits."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def peek(self, key: str) -> bytes | None:
        """Return the value or None."""
        with self._changed:
            return self._values.get(key)

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Return all values once posted, or None after ``within_seconds``."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._gone or all(key in self._values for key in keys), within_seconds
            ):
                return None
            if self._gone:
                raise self._gone
            return [self._values[key] for key in keys]

    def remove(self, key: str) -> None:
        """Forget ``key``."""
        with self._changed:
            self._values.pop(key, None)

    def fail(self, error: PeerFailed) -> None:
        """Break the board for good, as when the host of a real one dies: all waits raise."""
        with self._changed:
            self._gone = error
            self._changed.notify_all()

    def another(self) -> MemoryBoard:
        """Return itself: it is safe for many threads."""
        return self

    def here(self) -> str:
        """Return the loopback address: everybody is in this process."""
        return LOOPBACK
