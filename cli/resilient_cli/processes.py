"""Whether a process of this machine is still the one that somebody told of."""

from __future__ import annotations

import os
from pathlib import Path

_START_FIELD = 19
"""Of /proc/PID/stat behind the name, from 0: when it began, in clock ticks since the boot."""
_SLACK_MS = 60_000
"""What told the time of a process's start and of an event may have been set meanwhile."""


def is_alive(pid: int, told_ms: int) -> bool:
    """Say whether a process runs that had begun when it told something.

    Numbers of processes are used again: one that began later is another. Where there is no
    /proc, the number is all there is.

    Args:
        pid: of this machine.
        told_ms: when it said its first word, in milliseconds since 1970.
    """
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
    return state not in "ZX" and began_ms <= told_ms + _SLACK_MS


def _stat(pid: int) -> tuple[str, float]:
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = text.rpartition(")")[2].split()
    boot = next(
        line.split()[1]
        for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        if line.startswith("btime ")
    )
    ticks = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return fields[0], 1000 * (int(boot) + ticks)
