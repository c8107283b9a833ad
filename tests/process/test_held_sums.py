"""Ranks that hold steps on one host add numbers up through its keeper's memory."""

from __future__ import annotations

import threading

import pytest

from resilient import in_memory_steps as spine
from resilient.in_memory_steps import start_step_cache
from resilient.testing.memory_store import run_ranks
from tests.helpers.keepers import begin


def totals(keeper, folder):
    """Return what each of two ranks finds that both give a number for, or None."""

    def rank_main(world, board):
        checkpointer = begin(keeper, folder, kv_store=board, world=world)
        holding = start_step_cache(checkpointer)
        near = holding.near_sums
        found = None if near is None else near.total(near.give(world.rank + 1.5))
        holding.close()
        checkpointer.close()
        return found

    return run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("beside", "expected"), [("2", 4.0), ("1", None), ("", None)], ids=["one host", "two", "?"]
)
def test_ranks_of_one_host_add_numbers_up_through_its_keepers_memory(
    start, tmp_path, monkeypatch, beside, expected
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
    keeper = start()
    assert totals(keeper, tmp_path / "run") == [expected] * 2
    assert keeper.close() == 0
    assert list(keeper.shared.iterdir()) == []


def test_where_one_rank_cannot_read_anothers_memory_none_adds_so(start, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    turns, map_page = iter([True, False, False, False]), spine._map_page
    lock = threading.Lock()

    def page(path):
        with lock:
            fails = next(turns)
        if fails:
            raise OSError("no descriptor is left")
        return map_page(path)

    monkeypatch.setattr(spine, "_map_page", page)
    assert totals(start(), tmp_path / "run") == [None, None]
