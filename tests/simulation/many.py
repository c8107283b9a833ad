"""Many seeds, in as many processes as there are cores."""

from __future__ import annotations

from multiprocessing import get_context
from typing import TYPE_CHECKING

from tests.simulation.breakages import broken
from tests.simulation.storm import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.simulation.storm import Verdict

SEEDS_PER_PART = 200


def run_part(part: tuple[int, int, str]) -> list[Verdict]:
    """Simulate seeds from the first on, up to the second."""
    first, stop, breakage = part
    with broken(breakage):
        return [simulate(seed) for seed in range(first, stop)]


def verdicts(first: int, seeds: int, breakage: str, workers: int) -> Iterable[Verdict]:
    """Yield what came of each seed, in order; a process makes some hundred and is replaced."""
    stop = first + seeds
    step = SEEDS_PER_PART if not breakage else 50
    parts = [(at, min(at + step, stop), breakage) for at in range(first, stop, step)]
    # A ProcessPoolExecutor that replaces its processes may wait for ever (CPython, issue 115634).
    with get_context("spawn").Pool(workers, maxtasksperchild=4) as pool:
        for done in pool.imap(run_part, parts):
            yield from done
