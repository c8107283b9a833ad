"""The clock as a parameter, so that a test can own time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What the library may ask about time."""

    def monotonic_seconds(self) -> float:
        """Return seconds that never go back; only differences mean anything."""

    def now_iso(self) -> str:
        """Return the wall clock in UTC as ISO 8601 with milliseconds and a ``Z``."""

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""


class SystemClock:
    """The machine's own clock."""

    def monotonic_seconds(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def now_iso(self) -> str:
        """Return the wall clock in UTC, for example ``2026-08-22T12:03:41.207Z``."""
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def sleep(self, seconds: float) -> None:
        """Call ``time.sleep``."""
        time.sleep(seconds)
