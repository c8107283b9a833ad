"""Rounds of measurements of all contenders in shuffled order, and reports of their ratios.

A machine that slows down for a minute slows down every contender of that round. So the ratio of
two figures of one round is more reliable than the ratio of two averages. The median over rounds
ignores a round in which another process ran.
"""

from __future__ import annotations

import os
import platform
import random
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Rounds = list[dict[str, float]]
"""Figure of each contender, by round; less is better."""


@dataclass(frozen=True)
class Report:
    """Result of a benchmark.

    Attributes:
        benchmark: Name of the benchmark.
        ratios: Medians of per-round ratios.
        figures: Figures behind the ratios, with their units last in the name, and notes.
    """

    benchmark: str
    ratios: Mapping[str, float]
    figures: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the report with a description of the machine."""
        return {**asdict(self), "machine": machine()}


def take_turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int, *, seed: int = 0
) -> Rounds:
    """Call every contender once per round, each time in a newly shuffled order."""
    order = random.Random(seed)  # noqa: S311 - only the order depends on it
    found: Rounds = []
    for _ in range(rounds):
        names = list(contenders)
        order.shuffle(names)
        found.append({name: contenders[name]() for name in names})
    return found


def ratio(rounds: Rounds, contender: str, other: str) -> float:
    """Return the median over rounds of ``one`` over ``other``."""
    return round(median(figures[contender] / figures[other] for figures in rounds), 4)


def medians(rounds: Rounds, unit: str, *, scale: float = 1.0) -> dict[str, float]:
    """Return each contender's median figure, named with its unit."""
    return {
        f"{name}_{unit}": round(median(figures[name] for figures in rounds) * scale, 4)
        for name in rounds[0]
    }


def spread(rounds: Rounds, contender: str, other: str) -> list[float]:
    """Return the lowest and the highest of the per-round ratios."""
    ratios = [figures[contender] / figures[other] for figures in rounds]
    return [round(min(ratios), 4), round(max(ratios), 4)]


def machine() -> dict[str, Any]:
    """Return the properties of the machine that a reader needs to judge the figures."""
    return {
        "cpus": os.cpu_count(),
        "model": _cpu_model(),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def installed(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
