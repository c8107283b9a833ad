"""Hosts with unequal shares of a checkpoint: the fast wait for a slow one while it is at work."""

from __future__ import annotations

import threading

import pytest

from resilient.checkpoint import events
from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.boards import PATIENT_SECONDS, Timed
from tests.helpers.hosts import host
from tests.helpers.manifests import parts_of
from tests.helpers.tiered import desk_over, steps

CARRIED = "checkpoint-1-g1/carried/1"
RULING = "save/2/ruling"


class View:
    """The durable tier as some ranks see it; a test does something before each file is put."""

    exclusive = True

    def __init__(self, store, on_put) -> None:
        self._store, self._on_put = store, on_put

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, data) -> None:
        if key.startswith("checkpoint-1-"):
            self._on_put(key)
        self._store.put(key, data)


@pytest.fixture
def durable():
    return MemoryStore("test://durable")


def run(nears, views, board, last_step, heard=lambda _: None, within_seconds=20.0) -> None:
    """Save so many times on all ranks, and close."""

    def rank_main(world, _):
        desk = desk_over(
            nears[world.rank],
            views[world.rank],
            kv_store=board,
            world=world,
            tiering=TieringOptions(1, 9),
            on_event=lambda _, event: heard(event),
            within_seconds=within_seconds,
        )
        checkpointer = CheckpointEngine(desk)
        checkpointer.resume({})
        for step in range(1, last_step + 1):
            checkpointer.save(step, parts_of(step), CheckpointInfo())
            checkpointer.wait()
        checkpointer.close()

    run_ranks(len(nears), rank_main)


def test_a_host_with_three_times_the_ranks_may_take_many_deadlines_for_its_share(durable):
    a, b, board, put, told = host("a"), host("b"), Timed(InMemoryKVStore(), CARRIED), [], []

    def on_put(key) -> None:
        # From the second file on, a deadline of the other host has passed since the last.
        if put:
            board.let_a_deadline_pass()
        put.append(key)

    slow = View(durable, on_put)
    run([a, b, b, b], [durable, slow, slow, slow], board, 2, told.append)
    assert len(put) > 2, "or it was not slow"
    assert not [one for one in told if isinstance(one, events.PromotionFailed)]
    assert steps(durable) == [2, 1]
    assert [verify(durable, one, "full") for one in committed(durable)] == [[], []]
    ranks = {one.rank for one in read_manifest(durable, committed(durable)[0]).files}
    assert ranks == {0, 1, 2, 3}


def test_a_host_that_is_stuck_costs_that_promotion_and_no_save(durable):
    a, b, board = host("a"), host("b"), Timed(InMemoryKVStore(), CARRIED)
    put, reasons, is_told = [], [], threading.Event()

    def on_put(key) -> None:
        put.append(key)
        if len(put) == 2:
            board.let_a_deadline_pass()
            board.let_a_deadline_pass(is_last=True)
            assert is_told.wait(PATIENT_SECONDS)

    def heard(event) -> None:
        if isinstance(event, events.PromotionFailed):
            reasons.append(event.reason)
            is_told.set()

    slow = View(durable, on_put)
    run([a, b, b], [durable, slow, slow], board, 2, heard)
    (reason,) = reasons
    assert "ranks [1] did not answer" in reason
    assert steps(durable) == [2]


class Beaten(Timed):
    """Lets a deadline pass at each of the first two signs that a rank is at work."""

    def __init__(self, board, last) -> None:
        super().__init__(board, last)
        self.is_over = threading.Event()

    def post(self, key, value) -> None:
        super().post(key, value)
        if "/beat/0" in key and not self.is_over.is_set():
            self.let_a_deadline_pass()
            if value == b"2":
                self.is_over.set()


def test_a_promotion_may_take_longer_than_the_other_ranks_of_its_host_wait(durable):
    """They would wait for the one that promotes at their next save, and lose that."""
    near, board, told = host("a"), Beaten(InMemoryKVStore(), RULING), []
    held = View(durable, lambda _: board.is_over.wait(PATIENT_SECONDS))
    run([near, near], [held, held], board, 3, told.append, within_seconds=4.0)
    assert board.is_over.is_set(), "or nobody waited"
    assert not [one for one in told if isinstance(one, events.PromotionFailed)]
    assert steps(durable) == [3, 2]
