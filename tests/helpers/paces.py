"""A machine where a save rests: training seems to use every core, a piece of work to take long."""

from __future__ import annotations

import time

from resilient.vault.cores import Reading
from resilient.vault.pace import Machine, Pacing


class Used:
    """Cores that training uses, all of them."""

    def read(self):
        return Reading(time.monotonic(), 0.0, 0.0)

    def left(self, before, after, ours_seconds):
        return 0.0


class Worked:
    """A thread whose every piece of work seems to take seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 10.0
        return self.seconds


def resting(size_bytes: int, seconds_max: float) -> Pacing:
    """Return the pacing of saves that rest to their bound; the one before was long ago."""
    pacing = Pacing(Machine(Used(), worked=Worked()))
    pacing.begin(size_bytes, time.monotonic() - 3600.0, seconds_max)
    return pacing


def wait_until(condition) -> None:
    until = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)
