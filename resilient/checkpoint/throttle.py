"""Throttle background writes while training uses every core.

How many processor cores nobody uses: what the machine and this process's limits leave.

Persisting rests while training uses every core, unless somebody waits for the save.

A step that several threads make ends when the slowest of them does, so whoever takes a core from
one takes it from all: on two cores a save at full speed halves training's speed, and the low
priority of a keeper's process changes little of that. Therefore whoever persists, a thread or a
keeper, takes a small share of one core while no core is idle. The save stays bounded:
it is done in half of the time between two saves, and in ``seconds_max``, whatever that costs; and
whoever waits for it (the next save, a stop, the end) has it at full speed at once.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT = Path("/")
_TICKS_PER_SECOND = 100
"""Of ``/proc/stat``: USER_HZ, which is 100 on every architecture that torch runs on."""
_IDLE, _IO_WAIT = 4, 5
"""Where the two stand in a line of ``/proc/stat``, its name being 0 (proc(5))."""


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Counters at one moment; only differences mean anything.

    Attributes:
        at_seconds: monotonic time.
        idle_seconds: that all cores together were idle; None where nobody tells.
        used_seconds: of a processor, by this process.
    """

    at_seconds: float
    idle_seconds: float | None
    used_seconds: float


class CpuQuota:
    """The processor cores that this process may use.

    Args:
        root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._names = {f"cpu{number}" for number in _allowed()}
        self._count = usable_cores(root)

    def read(self) -> CpuSample:
        """Return the counters now."""
        return CpuSample(time.monotonic(), self._idle_seconds(), time.process_time())

    def left(self, before: CpuSample, after: CpuSample, ours_seconds: float) -> float:
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


WORK_SHARE = 0.015
"""Of one core, that persisting takes while no core is idle."""
INTERVAL_SHARE = 0.5
"""Of the time between two saves, that one of them may take."""
FIRST_SECONDS = 10.0
"""That the first save of a life may take: nobody knows yet when the next one comes."""
SMALL_BYTES = 8 << 20
"""A save that is no larger never rests: it is over before anybody notices."""
IDLE_CORES_MIN = 0.7
"""Persisting keeps one core busy; what is measured is never quite a whole one."""
LOOK_SECONDS = 0.2
"""The machine counts idle time in hundredths of a second, so a shorter look says little."""


class Throttle(Protocol):
    """Told of each piece of work on a save, and returns when the next may begin."""

    @property
    def rested_seconds(self) -> float:
        """How long the work rested so far."""

    def did(self, size_bytes: int) -> None:
        """Rest as long as it is due after so many bytes; from any thread."""


class NoThrottle:
    """The pace of a process that has nobody to disturb."""

    rested_seconds = 0.0

    def did(self, size_bytes: int) -> None:
        """Return at once."""


FULL_SPEED = NoThrottle()


def bound_seconds(interval_seconds: float | None, seconds_max: float) -> float:
    """Return how long a save may take to be durable because it rests.

    Args:
        interval_seconds: between the beginnings of the save before and this one; None for none.
        seconds_max: what the user allows.
    """
    if interval_seconds is None:
        return min(FIRST_SECONDS, seconds_max)
    return min(interval_seconds * INTERVAL_SHARE, seconds_max)


def rest_seconds(
    worked_seconds: float, done_share: float, elapsed_seconds: float, within_seconds: float
) -> float:
    """Return how long to rest after a piece of work, so that the whole ends in time.

    As long as keeps the work to its share of a core; no longer than this save is ahead of one
    that makes even progress and ends at its bound.

    Args:
        worked_seconds: of a processor, that the piece took.
        done_share: what is done of the save, 0 to 1.
        elapsed_seconds: since it began.
        within_seconds: its bound.
    """
    ahead_seconds = min(done_share, 1.0) * within_seconds - elapsed_seconds
    return max(min(worked_seconds * (1 / WORK_SHARE - 1), ahead_seconds), 0.0)


@dataclass(frozen=True, slots=True)
class CpuProbe:
    """What a pace asks of the machine, so that a test can own it.

    Attributes:
        cores: who uses them.
        now: monotonic seconds.
        worked: seconds of a processor that the calling thread used.
    """

    cores: CpuQuota
    now: Callable[[], float] = time.monotonic
    worked: Callable[[], float] = time.thread_time


class SaveThrottle:
    """The pace of one save, which all threads that work on it share.

    Args:
        machine: whose cores they are.
        size_bytes: of the save.
        within_seconds: its bound, from now on.
        since: counters when nothing was persisted yet.
    """

    def __init__(
        self, machine: CpuProbe, size_bytes: int, within_seconds: float, since: CpuSample
    ) -> None:
        self._machine = machine
        self._size_bytes = size_bytes
        self._within_seconds = within_seconds
        self._began_seconds = self._until_seconds = machine.now()
        self._done_bytes = 0
        self._since, self._ours_seconds = since, 0.0
        self._due_seconds = 0.0
        self._hurried_seconds: float | None = None
        self._is_idle = False
        self._worked = threading.local()
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        if size_bytes <= SMALL_BYTES or within_seconds <= 0:
            self._hurry.set()

    @property
    def rested_seconds(self) -> float:
        """How much sooner the save would have come to where it is, had it never rested."""
        with self._lock:
            until_seconds = self._hurried_seconds
            if until_seconds is None:
                until_seconds = self._machine.now()
            ahead_seconds = max(self._until_seconds - until_seconds, 0.0)
            return max(self._due_seconds - ahead_seconds, 0.0)

    def hurry(self) -> None:
        """Somebody waits: no rest any more, and those who rest go on."""
        with self._lock:
            if self._hurried_seconds is None:
                self._hurried_seconds = self._machine.now()
        self._hurry.set()

    def did(self, size_bytes: int) -> None:
        """Rest as long as it is due; several threads rest one after the other."""
        if self._hurry.is_set():
            return
        total_seconds = self._machine.worked()
        worked_seconds = total_seconds - getattr(self._worked, "seconds", total_seconds)
        self._worked.seconds = total_seconds
        with self._lock:
            now_seconds = self._machine.now()
            self._done_bytes += size_bytes
            self._ours_seconds += worked_seconds
            self._look(now_seconds)
            elapsed_seconds = now_seconds - self._began_seconds
            due_seconds = rest_seconds(
                worked_seconds,
                self._done_bytes / self._size_bytes,
                elapsed_seconds,
                self._within_seconds,
            )
            if self._is_idle:
                self._due_seconds -= max(self._until_seconds - now_seconds, 0.0)
                self._until_seconds = now_seconds
            if self._is_idle or not due_seconds:
                return
            self._until_seconds = max(self._until_seconds, now_seconds) + due_seconds
            self._due_seconds += due_seconds
            left_seconds = self._until_seconds - now_seconds
        self._hurry.wait(left_seconds)

    def _look(self, now_seconds: float) -> None:
        """See whether a core is idle, if the last look was long enough ago; the lock is held."""
        if now_seconds - self._since.at_seconds < LOOK_SECONDS:
            return
        seen = self._machine.cores.read()
        left = self._machine.cores.left(self._since, seen, self._ours_seconds)
        self._is_idle = left >= IDLE_CORES_MIN
        self._since, self._ours_seconds = seen, 0.0


class ThrottleHistory:
    """The paces of one life's saves: it remembers when the last one began.

    Args:
        machine: whose cores they are.
    """

    def __init__(self, machine: CpuProbe | None = None) -> None:
        self._machine = machine or CpuProbe(CpuQuota())
        self._since = self._machine.cores.read()
        self._last_seconds: float | None = None

    def begin(self, size_bytes: int, began_seconds: float, seconds_max: float) -> SaveThrottle:
        """Return the pace of a save.

        Args:
            size_bytes: of the save.
            began_seconds: monotonic time when training asked for it.
            seconds_max: what the user allows a save to take because it rests; 0 for none.
        """
        last_seconds, self._last_seconds = self._last_seconds, began_seconds
        interval = None if last_seconds is None else began_seconds - last_seconds
        within_seconds = bound_seconds(interval, seconds_max)
        return SaveThrottle(self._machine, size_bytes, within_seconds, self._since)

    def end(self) -> None:
        """Nothing is persisted from here on: how training uses the cores now counts."""
        self._since = self._machine.cores.read()


class SessionThrottle:
    """Paces the saves of one rank, which others may hasten and whose end makes haste for good.

    Args:
        pacing: the paces of its life.
    """

    def __init__(self, pacing: ThrottleHistory | None = None) -> None:
        self.pacing = pacing or ThrottleHistory()
        self.pace: SaveThrottle | None = None
        self._is_left = False
        self._lock = threading.Lock()

    def begin(self, size_bytes: int, began_seconds: float, seconds_max: float) -> SaveThrottle:
        """Return the pace of a save; who is gone leaves no training to disturb.

        Args:
            size_bytes: of the save.
            began_seconds: as for ``Pacing.begin``.
            seconds_max: as for ``Pacing.begin``.
        """
        with self._lock:
            self.pace = self.pacing.begin(size_bytes, began_seconds, seconds_max)
            if self._is_left:
                self.pace.hurry()
            return self.pace

    def hurry(self) -> None:
        """Somebody waits for the save in flight."""
        with self._lock:
            if self.pace is not None:
                self.pace.hurry()

    def leave(self) -> None:
        """The rank is gone: none of its saves rests any more."""
        with self._lock:
            self._is_left = True
            if self.pace is not None:
                self.pace.hurry()

    def end(self) -> None:
        """Nothing is persisted from here on."""
        self.pacing.end()
