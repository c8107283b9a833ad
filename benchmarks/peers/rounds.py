"""Costs of a contender in one turn (seconds, CPU seconds, memory), and statistics of turns."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers.quiet import undisturbed

Figures = dict[str, float]
Contender = Callable[[Path], Figures]
Maker = Callable[[], Contender]
Rounds = list[Figures]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def chosen(makers: Mapping[str, Maker]) -> dict[str, Contender]:
    """Make the contenders that ``CONTENDERS`` names, comma separated, and raw; all by default."""
    return {name: make() for name, make in makers.items() if name == "raw" or wants(name)}


def wants(name: str) -> bool:
    """Return True if ``CONTENDERS`` names this contender, or no contender."""
    names = os.environ.get("CONTENDERS", "").split(",")
    return names == [""] or name in names


def turns(
    contenders: Mapping[str, Contender],
    folder: Path,
    rounds: int,
    between: Callable[[], None] = os.sync,
) -> Rounds:
    """Call every contender once per round, in shuffled order, each time in a new folder.

    One extra round is made first and discarded: it warms the buffers that are reused. A turn is
    repeated if other processes used the machine. The work of ``between`` runs between two turns and
    is charged to no contender. By default the kernel writes and frees what is left (``os.sync``).
    """
    order = random.Random(0)  # noqa: S311 - only the order depends on it
    found = []
    for number in range(rounds + 1):
        names = list(contenders)
        order.shuffle(names)
        figures: Figures = {}
        for name in names:
            place = folder / f"{name}-{number}"
            once = partial(turn, contenders[name], place, between)
            measured = undisturbed(once) if number else once()
            figures |= {f"{name}_{what}": value for what, value in measured.items()}
        found.append(figures)
    return found[1:]


def turn(contender: Contender, place: Path, between: Callable[[], None]) -> Figures:
    """Call one contender in a new folder."""
    figures: Figures = {}
    place.mkdir()
    with costs(figures):
        figures |= contender(place)
    shutil.rmtree(place)
    between()
    return figures


@contextmanager
def costs(figures: Figures) -> Iterator[None]:
    """Record the CPU seconds of this process, and the memory that it added."""
    began, held_bytes = time.process_time(), _memory("VmRSS")
    _CLEAR.write_text("5")  # resets the high-water mark
    yield
    figures["cpu"] = time.process_time() - began
    figures["peak_mib"] = max(_memory("VmHWM") - held_bytes, 0.0)


def _memory(field: str) -> float:
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


def ratio(found: Rounds, contender: str, other: str) -> float:
    """Return the median over rounds of ``one`` over ``other``."""
    return round(median(figures[contender] / figures[other] for figures in found), 4)


def ratios(found: Rounds, pairs: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Return the ratios by name, for the figures that were measured."""
    return {
        name: ratio(found, contender, other)
        for name, (contender, other) in pairs.items()
        if contender in found[0] and other in found[0]
    }


def medians(found: Rounds) -> dict[str, float]:
    """Return the median of each figure; a figure without a unit in its name is in seconds."""
    return {
        name if name.endswith(("_mib", "_cores")) else f"{name}_seconds": round(
            median(figures[name] for figures in found), 4
        )
        for name in sorted(found[0])
    }


def spread(found: Rounds, contender: str, other: str) -> list[float]:
    """Return the lowest and the highest per-round ratio; empty if a figure is missing."""
    if contender not in found[0] or other not in found[0]:
        return []
    all_of_them = [figures[contender] / figures[other] for figures in found]
    return [round(min(all_of_them), 4), round(max(all_of_them), 4)]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
