"""Many seeds of hosts, in as many processes as there are cores."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING

from tests.simulation.hosts.breakages import broken_hosts
from tests.simulation.hosts.storm import simulate_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.simulation.hosts.storm import HostVerdict

_SEEDS_PER_PART = 50


def run_hosts(part: tuple[int, int, str]) -> list[HostVerdict]:
    """Simulate seeds from the first on, up to the second."""
    first, stop, breakage = part
    with broken_hosts(breakage):
        return [simulate_hosts(seed) for seed in range(first, stop)]


def host_verdicts(first: int, seeds: int, breakage: str, workers: int) -> Iterable[HostVerdict]:
    """Yield what came of each seed, in order."""
    stop = first + seeds
    parts = [
        (at, min(at + _SEEDS_PER_PART, stop), breakage)
        for at in range(first, stop, _SEEDS_PER_PART)
    ]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in pool.map(run_hosts, parts):
            yield from done
