"""How many processor cores nobody uses: what the machine and this process's limits leave."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_TICKS_PER_SECOND = 100
"""Of ``/proc/stat``: USER_HZ, which is 100 on every architecture that torch runs on."""
_IDLE, _IO_WAIT = 4, 5
"""Where the two stand in a line of ``/proc/stat``, its name being 0 (proc(5))."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment; only differences mean anything.

    Attributes:
        at_seconds: monotonic time.
        idle_seconds: that all cores together were idle; None where nobody tells.
        used_seconds: of a processor, by this process.
    """

    at_seconds: float
    idle_seconds: float | None
    used_seconds: float


class Cores:
    """The processor cores that this process may use.

    Args:
        root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._names = {f"cpu{number}" for number in _allowed()}
        self._count = usable_cores(root)

    def read(self) -> Reading:
        """Return the counters now."""
        return Reading(time.monotonic(), self._idle_seconds(), time.process_time())

    def left(self, before: Reading, after: Reading, ours_seconds: float) -> float:
        """Return how many cores were idle between two readings, or would have been without us.

        Args:
            before: the first reading.
            after: the second.
            ours_seconds: of a processor that we used in between.
        """
        took_seconds = max(after.at_seconds - before.at_seconds, 1e-9)
        others_seconds = after.used_seconds - before.used_seconds - ours_seconds
        within_limits = self._count - others_seconds / took_seconds
        if before.idle_seconds is None or after.idle_seconds is None:
            return within_limits
        idle_seconds = after.idle_seconds - before.idle_seconds + ours_seconds
        return min(within_limits, idle_seconds / took_seconds)

    def _idle_seconds(self) -> float | None:
        with suppress(OSError):
            lines = (self._root / "proc/stat").read_text(encoding="ascii").splitlines()
            rows = (line.split() for line in lines if line.startswith("cpu"))
            ticks = [int(row[_IDLE]) + int(row[_IO_WAIT]) for row in rows if row[0] in self._names]
            return sum(ticks) / _TICKS_PER_SECOND if ticks else None
        return None


def usable_cores(root: Path = _ROOT) -> float:
    """Return how many cores this process may use.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    return quota_cores(root) or float(len(_allowed()))


def quota_cores(root: Path = _ROOT) -> float | None:
    """Return how many cores this process's control group (version 2) may use; None if any."""
    with suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "/")
        quota, period = (root / "sys/fs/cgroup" / group.strip("/") / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def _allowed() -> set[int]:
    with suppress(AttributeError, OSError):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
