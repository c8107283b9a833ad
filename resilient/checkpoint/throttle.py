"""Throttle of background saves while training uses every core, based on CPU measurements.

A save runs in a thread or in the saver daemon (a process per host) while training continues. A
multi-threaded step ends with its slowest thread, so a process that uses the core of one thread
delays the step. On two cores a save at full speed halves training's speed, and the low priority of
the daemon hardly helps. A save therefore uses only a small share of one core while no core is idle.

The save must end within half of the time between two saves, and within ``seconds_max``, even if
this limit slows training. If training waits for the save (at the next save, a stop or the end), the
save continues at full speed.
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
"""Ticks of ``/proc/stat``: USER_HZ, which is 100 on every architecture that torch runs on."""
_IDLE, _IO_WAIT = 4, 5
"""Columns of idle and I/O wait in a line of ``/proc/stat``; its name is column 0 (proc(5))."""


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Counters at one moment; only differences are meaningful.

    Attributes:
        at_seconds: Monotonic time.
        idle_seconds: Idle time of all cores together; None if the system does not report it.
        used_seconds: Processor time of this process.
    """

    at_seconds: float
    idle_seconds: float | None
    used_seconds: float


class CpuQuota:
    """Processor cores that this process may use.

    Args:
        root: Folder that contains ``proc`` and ``sys``.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._names = {f"cpu{number}" for number in _allowed_cores()}
        self._count = usable_cores(root)

    def read(self) -> CpuSample:
        """Return the current counters."""
        return CpuSample(time.monotonic(), self._idle_seconds(), time.process_time())

    def left(self, before: CpuSample, after: CpuSample, own_seconds: float) -> float:
        """Return how many cores would have been idle between two samples without the save.

        Args:
            before: First sample.
            after: Second sample.
            own_seconds: Processor seconds that the save used in between.
        """
        took_seconds = max(after.at_seconds - before.at_seconds, 1e-9)
        others_seconds = after.used_seconds - before.used_seconds - own_seconds
        within_limits = self._count - others_seconds / took_seconds
        if before.idle_seconds is None or after.idle_seconds is None:
            return within_limits
        idle_seconds = after.idle_seconds - before.idle_seconds + own_seconds
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
        root: Folder that contains ``proc`` and ``sys``.
    """
    return quota_cores(root) or float(len(_allowed_cores()))


def quota_cores(root: Path = _ROOT) -> float | None:
    """Return the core quota of this process's control group (version 2); None for no quota."""
    with suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "/")
        quota, period = (root / "sys/fs/cgroup" / group.strip("/") / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return None


def _allowed_cores() -> set[int]:
    with suppress(AttributeError, OSError):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


WORK_SHARE = 0.015
"""Share of one core that a save takes while no core is idle."""
INTERVAL_SHARE = 0.5
"""Share of the time between two saves that one save may take."""
FIRST_SECONDS = 10.0
"""Bound of the first save of an attempt, because the save interval is still unknown."""
SMALL_BYTES = 8 << 20
"""A save of at most this size never pauses, because it is too short to matter."""
IDLE_CORES_MIN = 0.7
"""Least number of idle cores for a save without pauses: one core, less the measurement error."""
LOOK_SECONDS = 0.2
"""Least time between two measurements; the counter of idle time has steps of 0.01 s."""


class Throttle(Protocol):
    """Protocol of a throttle, which a save calls after each piece of work."""

    @property
    def rested_seconds(self) -> float:
        """Total pause so far."""

    def after_write(self, size_bytes: int) -> None:
        """Make the pause that is due after ``size_bytes`` of work; from any thread."""


class NoThrottle:
    """Throttle of a process that has no training to disturb."""

    rested_seconds = 0.0

    def after_write(self, size_bytes: int) -> None:
        """Return at once."""


FULL_SPEED = NoThrottle()


def bound_seconds(interval_seconds: float | None, seconds_max: float) -> float:
    """Return the longest time until a save is durable, pauses included.

    Args:
        interval_seconds: Time between the beginnings of the previous save and this one; None for
            the first.
        seconds_max: Limit that the user allows.
    """
    if interval_seconds is None:
        return min(FIRST_SECONDS, seconds_max)
    return min(interval_seconds * INTERVAL_SHARE, seconds_max)


def due_pause_seconds(
    worked_seconds: float, done_share: float, elapsed_seconds: float, within_seconds: float
) -> float:
    """Return the pause after a piece of work, such that the whole save ends in time.

    The pause limits the work to its share of a core. With even progress, a save would end exactly
    at the bound. The pause is at most the time by which this save is ahead of even progress.

    Args:
        worked_seconds: Processor seconds of the piece.
        done_share: Completed share of the save, 0 to 1.
        elapsed_seconds: Time since the save began.
        within_seconds: Bound of the save.
    """
    ahead_seconds = min(done_share, 1.0) * within_seconds - elapsed_seconds
    return max(min(worked_seconds * (1 / WORK_SHARE - 1), ahead_seconds), 0.0)


@dataclass(frozen=True, slots=True)
class CpuProbe:
    """CPU measurements for a throttle, which tests can replace.

    Attributes:
        cores: CPU quota and idle time.
        now: Monotonic seconds.
        worked: Processor seconds of the calling thread.
    """

    cores: CpuQuota
    now: Callable[[], float] = time.monotonic
    worked: Callable[[], float] = time.thread_time


class SaveThrottle:
    """Throttle of one save, shared by all threads that work on it.

    Args:
        machine: CPU measurements.
        size_bytes: Size of the save.
        within_seconds: Bound of the save, from now on.
        since: Counters before the save began.
    """

    def __init__(
        self, machine: CpuProbe, size_bytes: int, within_seconds: float, since: CpuSample
    ) -> None:
        self._machine = machine
        self._size_bytes = size_bytes
        self._within_seconds = within_seconds
        self._began_seconds = self._until_seconds = machine.now()
        self._done_bytes = 0
        self._since, self._own_seconds = since, 0.0
        self._due_seconds = 0.0
        self._hurried_seconds: float | None = None
        self._is_idle = False
        self._work_time = threading.local()
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        if size_bytes <= SMALL_BYTES or within_seconds <= 0:
            self._hurry.set()

    @property
    def rested_seconds(self) -> float:
        """Delay of the save by its pauses so far."""
        with self._lock:
            until_seconds = self._hurried_seconds
            if until_seconds is None:
                until_seconds = self._machine.now()
            ahead_seconds = max(self._until_seconds - until_seconds, 0.0)
            return max(self._due_seconds - ahead_seconds, 0.0)

    def hurry(self) -> None:
        """End all pauses, because training waits for the save."""
        with self._lock:
            if self._hurried_seconds is None:
                self._hurried_seconds = self._machine.now()
        self._hurry.set()

    def after_write(self, size_bytes: int) -> None:
        """Make the pause that is due; several threads pause one after the other."""
        if self._hurry.is_set():
            return
        total_seconds = self._machine.worked()
        worked_seconds = total_seconds - getattr(self._work_time, "seconds", total_seconds)
        self._work_time.seconds = total_seconds
        with self._lock:
            now_seconds = self._machine.now()
            self._done_bytes += size_bytes
            self._own_seconds += worked_seconds
            self._update_idle(now_seconds)
            elapsed_seconds = now_seconds - self._began_seconds
            due_seconds = due_pause_seconds(
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

    def _update_idle(self, now_seconds: float) -> None:
        """Check for an idle core if the last check was long enough ago; the lock is held."""
        if now_seconds - self._since.at_seconds < LOOK_SECONDS:
            return
        core_reading = self._machine.cores.read()
        idle_cores = self._machine.cores.left(self._since, core_reading, self._own_seconds)
        self._is_idle = idle_cores >= IDLE_CORES_MIN
        self._since, self._own_seconds = core_reading, 0.0


class ThrottleHistory:
    """Factory of the throttles for one attempt's saves, with the start time of the last save.

    Args:
        machine: CPU measurements.
    """

    def __init__(self, machine: CpuProbe | None = None) -> None:
        self._machine = machine or CpuProbe(CpuQuota())
        self._since = self._machine.cores.read()
        self._last_seconds: float | None = None

    def begin(self, size_bytes: int, began_seconds: float, seconds_max: float) -> SaveThrottle:
        """Return the throttle of a save.

        Args:
            size_bytes: Size of the save.
            began_seconds: Monotonic time when training requested it.
            seconds_max: Limit of the user on the time until the save is durable; 0 for no pauses.
        """
        last_seconds, self._last_seconds = self._last_seconds, began_seconds
        interval = None if last_seconds is None else began_seconds - last_seconds
        within_seconds = bound_seconds(interval, seconds_max)
        return SaveThrottle(self._machine, size_bytes, within_seconds, self._since)

    def end(self) -> None:
        """Restart the measurement of training's own core use, because no save is in progress."""
        self._since = self._machine.cores.read()


class SessionThrottle:
    """Throttle of one rank's saves; another thread or the end of the rank ends its pauses.

    Args:
        pacing: Throttle history of its attempt.
    """

    def __init__(self, pacing: ThrottleHistory | None = None) -> None:
        self.pacing = pacing or ThrottleHistory()
        self.pace: SaveThrottle | None = None
        self._is_left = False
        self._lock = threading.Lock()

    def begin(self, size_bytes: int, began_seconds: float, seconds_max: float) -> SaveThrottle:
        """Return the throttle of a save; without pauses if the rank is gone.

        Args:
            size_bytes: Size of the save.
            began_seconds: As for ``ThrottleHistory.begin``.
            seconds_max: As for ``ThrottleHistory.begin``.
        """
        with self._lock:
            self.pace = self.pacing.begin(size_bytes, began_seconds, seconds_max)
            if self._is_left:
                self.pace.hurry()
            return self.pace

    def hurry(self) -> None:
        """End the pauses of the save in flight, because training waits for it."""
        with self._lock:
            if self.pace is not None:
                self.pace.hurry()

    def leave(self) -> None:
        """End the pauses of all saves of a rank that is gone."""
        with self._lock:
            self._is_left = True
            if self.pace is not None:
                self.pace.hurry()

    def end(self) -> None:
        """Restart the measurement, because no save is in progress."""
        self.pacing.end()
