"""A machine where a save rests: training seems to use every core, a piece of work to take long."""

from __future__ import annotations

import time

from resilient.checkpoint.throttle import CpuProbe, CpuSample, ThrottleHistory


class Used:
    """Cores that training uses, all of them."""

    def read(self):
        return CpuSample(time.monotonic(), 0.0, 0.0)

    def left(self, before, after, ours_seconds):
        return 0.0


class Worked:
    """A thread whose every piece of work seems to take seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 10.0
        return self.seconds


def resting(size_bytes: int, seconds_max: float) -> ThrottleHistory:
    """Return the pacing of saves that rest to their bound; the one before was long ago."""
    pacing = ThrottleHistory(CpuProbe(Used(), worked=Worked()))
    pacing.begin(size_bytes, time.monotonic() - 3600.0, seconds_max)
    return pacing


def wait_until(condition) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
