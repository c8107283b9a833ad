"""A clock that moves for one job alone, and for nobody else."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime

import pytest

from resilient.clock import SystemClock
from resilient.errors import ConfigError
from resilient.testing.chaos import clock_shift
from resilient.testing.chaos.clock_shift import MovableClock, why_not_moving

HOUR = 3600.0
# Asks whenever a line comes: the time of day, and how long a short sleep and a wait have taken.
TOLD = """
import ctypes, sys, threading, time
from datetime import datetime

libc = ctypes.CDLL(None)
libc.time.restype = ctypes.c_long

class Moment(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

def slept(seconds, until):
    began = time.monotonic()
    moment = Moment(int(until), int(until % 1 * 1e9))
    libc.clock_nanosleep(0, 1, ctypes.byref(moment), None)  # the time of day, an absolute moment
    return time.monotonic() - began

for _ in sys.stdin:
    began = time.monotonic()
    time.sleep(0.05)
    threading.Event().wait(0.05)
    took = time.monotonic() - began
    until = slept(0.2, time.time() + 0.2)
    print(time.time(), datetime.now().timestamp(), libc.time(None), took, until, flush=True)
"""

pytestmark = pytest.mark.skipif(bool(why_not_moving()), reason=why_not_moving())


def now_seconds():
    return datetime.fromisoformat(SystemClock().now_iso()).timestamp()


def test_a_clock_moves_forward_and_back_while_processes_run(tmp_path):
    clock = MovableClock(tmp_path)
    command = [sys.executable, "-S", "-c", TOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clock.environ, **pipes) as other:
        for seconds, moved in ((0.0, 0.0), (-HOUR, -HOUR), (25.5 * HOUR, 24.5 * HOUR)):
            clock.move(seconds)
            other.stdin.write("now\n")
            other.stdin.flush()
            *days, took, until = map(float, other.stdout.readline().split())
            assert [one - now_seconds() for one in days] == [pytest.approx(moved, abs=5.0)] * 3
            # Neither ends at once, nor after an hour.
            assert 0.1 <= took < 5.0
            assert 0.15 <= until < 5.0
        assert clock.moved_seconds == 24.5 * HOUR
        other.stdin.close()


def test_whoever_starts_it_keeps_its_own_clock(tmp_path):
    before_seconds = now_seconds()
    MovableClock(tmp_path).move(HOUR)
    assert now_seconds() - before_seconds < HOUR


def test_what_is_preloaded_already_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    assert MovableClock(tmp_path).environ["LD_PRELOAD"].split()[1:] == ["/lib/other.so"]


def test_without_a_compiler_it_is_said_and_not_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "`cc` is not installed" in why_not_moving()
    with pytest.raises(ConfigError, match="no clock can be moved: `cc "):
        MovableClock(tmp_path)


def test_a_library_that_is_not_preloaded_is_found_out(monkeypatch):
    monkeypatch.setattr(clock_shift, "_PROBE_SCRIPT", "import time; print(1.0)")
    assert "does not preload the library" in why_not_moving()
