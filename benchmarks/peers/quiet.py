"""Whether others used the machine while something was measured; then it is measured again."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.peers.rounds import Figures

OTHERS_CORES_MAX = 0.1
"""Of a core, that others may use while something is measured."""
TRIES_MAX = 4
_TICKS_PER_SECOND = 100
# proc(5): places behind the name in `/proc/PID/stat`.
_GROUP, _FIRST, _BEHIND = 2, 11, 15


def others_seconds() -> float:
    """Return the seconds of a processor that processes outside this process's group have used.

    Kernel threads are in no group: they may work for us.
    """
    ours, ticks = os.getpgrp(), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[_GROUP]) not in (0, ours):
                ticks += sum(map(int, fields[_FIRST:_BEHIND]))
    return ticks / _TICKS_PER_SECOND


def undisturbed(measure: Callable[[], Figures]) -> Figures:
    """Return what ``measure`` found while nobody else used the machine.

    After so many tries the least disturbed counts. ``others_cores`` is how much of a core
    others used in the one that counts.
    """
    found: list[Figures] = []
    while len(found) < TRIES_MAX:
        began, before = time.perf_counter(), others_seconds()
        figures = measure()
        took = time.perf_counter() - began
        # Less than before means that somebody ended, who was there until then.
        others = abs(others_seconds() - before) / took
        found.append(figures | {"others_cores": others})
        if others <= OTHERS_CORES_MAX:
            break
    return min(found, key=lambda one: one["others_cores"])
