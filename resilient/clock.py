"""Clock protocol that tests can replace, system clock and stopwatches."""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
_BOOT_NAME_LENGTH = 13  # enough that two hosts of a run never share a name
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|m|h|d|w)")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_length(text: str) -> float | None:
    """Return the seconds of a length such as ``30s``, ``10m``, ``2h``, ``1d``, ``1w``, or None."""
    match = _DURATION.fullmatch(text.strip().lower())
    return float(match[1]) * _UNITS[match[2]] if match else None


class Clock(Protocol):
    """Time source of the library."""

    def monotonic_seconds(self) -> float:
        """Return seconds that never go back; only differences are meaningful."""

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


@cache
def boot_name() -> str:
    """Return the name of the machine's current boot, on which the monotonic clock depends.

    The name is empty where the system does not provide it.
    """
    try:
        return _BOOT_ID_FILE.read_text(encoding="ascii").strip()[:_BOOT_NAME_LENGTH]
    except OSError:
        return ""


class Timed:
    """Context manager that measures the time spent inside, also after an error.

    This is a class, because a training step enters several timers. A generator would cost more than
    the measured code.

    Args:
        clock: Time source.
        on_exit: Callback that receives the seconds.
    """

    __slots__ = ("_began_seconds", "_clock", "_on_exit")

    def __init__(self, clock: Clock, on_exit: Callable[[float], None]) -> None:
        self._clock, self._on_exit = clock, on_exit
        self._began_seconds = 0.0

    def __enter__(self) -> None:
        self._began_seconds = self._clock.monotonic_seconds()

    def __exit__(self, *_: object) -> None:
        self._on_exit(self._clock.monotonic_seconds() - self._began_seconds)


class Stopwatch:
    """Sum of measured times; started and stopped by one thread, read by any thread.

    Args:
        clock: Time source.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # One tuple, so that a reader always sees a consistent pair.
        self._state: tuple[float, float | None] = (0.0, None)

    def seconds(self) -> float:
        """Return the seconds added up so far, including the running interval."""
        done_seconds, since_seconds = self._state
        if since_seconds is None:
            return done_seconds
        return done_seconds + self._clock.monotonic_seconds() - since_seconds

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time spent inside; nested uses count once."""
        if self._state[1] is not None:
            yield
            return
        self._state = (self._state[0], self._clock.monotonic_seconds())
        try:
            yield
        finally:
            self._state = (self.seconds(), None)
