"""Whether the kernel's out-of-memory killer was at work: counters before and after.

A SIGKILL says nothing of its sender. The victim's control group counts it (``memory.events`` in
version 2, ``memory.oom_control`` in version 1), and so does the machine (``/proc/vmstat``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ROOT = Path("/")
_NAME = "oom_kill"


class OomWatch:
    """Counts what was killed for memory since ``begin``.

    Args:
        root: where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._before: dict[Path, int] = {}
        self._machine_before: int | None = None

    def begin(self) -> None:
        """Forget the life before."""
        self._before.clear()
        self._machine_before = _count(self._root / "proc/vmstat")

    def learn(self, pids: Iterable[int]) -> None:
        """Find the control groups of processes while they live; one may move into another."""
        for path in {path for pid in pids for path in self._counters_of(pid)}:
            if path not in self._before and (count := _count(path)) is not None:
                self._before[path] = count

    def kills(self) -> int | None:
        """Return how many were killed in those groups; None where no group tells."""
        if not self._before:
            return None
        now = {path: _count(path) for path in self._before}
        return sum(max(0, (now[path] or 0) - before) for path, before in self._before.items())

    def machine_kills(self) -> int | None:
        """Return how many were killed on this machine; None where it does not tell."""
        now = _count(self._root / "proc/vmstat")
        if now is None or self._machine_before is None:
            return None
        return now - self._machine_before

    def _counters_of(self, pid: int) -> list[Path]:
        found = []
        for line in _lines(self._root / f"proc/{pid}/cgroup"):
            _, controllers, name = line.split(":", 2)
            inside = name.strip("/")
            if not controllers:
                found.append(self._root / "sys/fs/cgroup" / inside / "memory.events")
            elif "memory" in controllers.split(","):
                found.append(self._root / "sys/fs/cgroup/memory" / inside / "memory.oom_control")
        return found


def _count(path: Path) -> int | None:
    pairs = (line.split() for line in _lines(path))
    return next((int(pair[1]) for pair in pairs if len(pair) > 1 and pair[0] == _NAME), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
