"""Ranks as threads: a way to run one function on every rank of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from resilient.world.memory import MemoryBoard
from resilient.world.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


def run_gang(size: int, rank_main: Callable[[World, MemoryBoard], Result]) -> list[Result]:
    """Run ``rank_main`` once per rank, each in its own thread, and return the results by rank.

    Raises:
        BaseException: whatever the lowest failing rank raised, after all ranks ended.
    """
    board = MemoryBoard()
    with ThreadPoolExecutor(size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(rank_main, World(rank, size, rank), board) for rank in range(size)]
    return [future.result() for future in futures]
