"""Whether a process of this machine is still the one that somebody told of."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.clock import boot_name

if TYPE_CHECKING:
    from resilient.accounting.agents import Agent

_START_FIELD = 19
"""Of /proc/PID/stat behind the name, from 0: when it began, in clock ticks since the boot."""
_SLACK_MS = 60_000
"""What told the time of a process's start and of an event may have been set meanwhile."""
_TICKS_MS = 1_000
"""Both are seconds of one start of the machine, one of them in ticks: nothing can set them."""


def is_agent_alive(agent: Agent) -> bool:
    """Say whether a launcher that was told of on this machine runs still.

    Where its first word says at which start of the machine that was, the time of day, which may
    have been set since, is not asked.
    """
    ours = boot_name()
    if not (agent.boot and ours):
        return is_alive(agent.pid, agent.began_ms)
    if agent.boot != ours:
        return False  # all that ran then is gone
    return _runs_since(agent.pid, agent.since_boot_ms + _slept_ms() + _TICKS_MS)


def is_alive(pid: int, told_ms: int) -> bool:
    """Say whether a process runs that had begun when it told something.

    Numbers of processes are used again: one that began later is another. Where there is no
    /proc, the number is all there is.

    Args:
        pid: of this machine.
        told_ms: when it said its first word, in milliseconds since 1970.
    """
    try:
        boot_ms = _boot_ms()
    except (OSError, ValueError, StopIteration):
        boot_ms = 0
    return _runs_since(pid, told_ms + _SLACK_MS - boot_ms)


def _runs_since(pid: int, latest_ms: int) -> bool:
    """Say whether a process runs that began so long after the boot, or before."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
    try:
        state, began_ms = _stat(pid)
    except (OSError, ValueError, IndexError):
        return not Path("/proc/self").exists()
    return state not in "ZX" and began_ms <= latest_ms


def _stat(pid: int) -> tuple[str, float]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    return fields[0], 1000 * int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")


def _boot_ms() -> int:
    """Return when the machine was started, as it tells by its time of day now."""
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    return 1000 * int(next(one.split()[1] for one in lines if one.startswith("btime ")))


def _slept_ms() -> int:
    """Return how long the machine was suspended: starts of processes count that, words do not."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return round(1000 * (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()))
