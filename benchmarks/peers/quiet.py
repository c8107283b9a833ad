"""Detection of other processes that disturb a measurement, which is then repeated."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from benchmarks.peers.rounds import Figures

OTHERS_CORES_MAX = 0.1
"""Share of a core that other processes may use during a measurement."""
TRIES_MAX = 4
_TICKS_PER_SECOND = 100
# proc(5): positions after the name in `/proc/PID/stat`.
_PARENT, _GROUP, _FIRST, _BEHIND = 1, 2, 11, 15


def others_seconds() -> float:
    """Return the processor seconds of other processes: not of this group, and not descendants.

    A server that was started for the measurement has a session of its own, but is a descendant.
    Kernel threads are in no group, and do not count because they may work for us.
    """
    rows = dict(_rows())
    groups = {pid: int(row[_GROUP]) for pid, row in rows.items()}
    own_pids = {pid for pid, group in groups.items() if group == os.getpgrp()}
    ticks = sum(
        sum(map(int, row[_FIRST:_BEHIND]))
        for pid, row in rows.items()
        if groups[pid] and own_pids.isdisjoint(_line(pid, rows))
    )
    return ticks / _TICKS_PER_SECOND


def _rows() -> Iterator[tuple[int, list[str]]]:
    """Yield every process with the fields after its name."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            yield int(stat.parent.name), stat.read_text("utf-8").rpartition(")")[2].split()


def _line(pid: int, rows: Mapping[int, list[str]]) -> Iterator[int]:
    """Yield a process and its ancestors, without process 1."""
    while pid in rows and pid > 1:
        yield pid
        pid = int(rows[pid][_PARENT])


def undisturbed(measure: Callable[[], Figures]) -> Figures:
    """Return the figures of a measurement that no other process disturbed.

    After 4 tries the least disturbed one counts. ``others_cores`` is the share of a core that other
    processes used in it.
    """
    found: list[Figures] = []
    while len(found) < TRIES_MAX:
        began, before = time.perf_counter(), others_seconds()
        figures = measure()
        took = time.perf_counter() - began
        # A smaller value than before means that a process ended meanwhile.
        others_cores = abs(others_seconds() - before) / took
        found.append(figures | {"others_cores": others_cores})
        if others_cores <= OTHERS_CORES_MAX:
            break
    return min(found, key=lambda measured: measured["others_cores"])
