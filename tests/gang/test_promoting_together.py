"""Promotions of several hosts that go at different speeds, and what they owe when a run ends."""

from __future__ import annotations

import threading

import pytest

from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.distributed.coordination import RankFailure, capture_failure
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.errors import StoreUnavailable
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.hosts import host
from tests.helpers.manifests import parts_of
from tests.helpers.tiered import desk_over, steps

SECOND = CheckpointId(1, 2)


class View:
    """The durable tier as one host sees it; a test looks at what it does there."""

    exclusive = True

    def __init__(self, store, on_put=None, on_list=None) -> None:
        self._store, self._on_put, self._on_list = store, on_put, on_list

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, data) -> None:
        if self._on_put:
            self._on_put(key)
        self._store.put(key, data)

    def list(self, prefix=""):
        if self._on_list:
            self._on_list(prefix)
        return self._store.list(prefix)


class Watched(InMemoryKVStore):
    """Says when the coordinator waits for its promotion before it rules on the next save."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = threading.Event()

    def post(self, key, value) -> None:
        super().post(key, value)
        if "/beat/0" in key and "/promote/" not in key:
            self.moved.set()


@pytest.fixture
def nears():
    return [host("a"), host("b")]


@pytest.fixture
def durable():
    return MemoryStore("test://durable")


def run(nears, views, board, before_save, every=99, within_seconds=20.0) -> list:
    """Save four times; the third is protected when it comes, and with the fourth the second.

    Returns:
        What each rank heard at its end.
    """
    keeps = {3: [CheckpointId(1, 3)], 4: [SECOND, CheckpointId(1, 3)]}

    def rank_main(world, _):
        desk = desk_over(
            nears[world.rank],
            views[world.rank],
            kv_store=board,
            world=world,
            tiering=TieringOptions(every, 9),
            within_seconds=within_seconds,
        )
        checkpointer = CheckpointEngine(desk)
        checkpointer.resume({})
        for step in range(1, 5):
            before_save(world, checkpointer, step)
            checkpointer.save(step, parts_of(step), CheckpointInfo(), keep=keeps.get(step, []))
            checkpointer.wait()
        return capture_failure(checkpointer.close)

    return run_ranks(2, rank_main)


def test_no_host_brings_an_older_one_while_the_other_rotates_after_a_newer(nears, durable):
    board, armed, swept = Watched(), threading.Event(), []

    def on_list(prefix) -> None:
        in_promotion = threading.current_thread().name.startswith("resilient-promote")
        if in_promotion and prefix.startswith("checkpoint") and armed.is_set():
            armed.clear()
            assert board.moved.wait(20), "host a does not wait, and host b does not go on"

    def on_put(key) -> None:
        if key.startswith("checkpoint-2-g1/"):
            durable.put(key, b"")
            board.moved.set()

    def before_save(world, checkpointer, step) -> None:
        if step < 4:
            checkpointer._context.promoter._settle()
        if step == 3 and world.is_coordinator:
            armed.set()

    delete = durable.delete
    durable.delete = lambda key: (swept.append(key), delete(key))
    views = [View(durable, on_list=on_list), View(durable, on_put=on_put)]
    assert run(nears, views, board, before_save, within_seconds=8.0) == [None, None]
    assert not armed.is_set(), "or nothing was tested"
    assert swept
    assert not [key for key in swept if key.startswith("checkpoint-2-g1/")]
    assert not verify(durable, SECOND, "full")


def test_all_hosts_bring_what_the_run_protects_before_it_ends(nears, durable):
    """One host could not bring its files of the best; the end is where both try again."""
    refused = []

    def on_put(key) -> None:
        if key.startswith("checkpoint-2-g1/") and not refused:
            refused.append(key)
            raise StoreUnavailable("the line is cut", key=key)

    views = [View(durable), View(durable, on_put=on_put)]
    assert run(nears, views, InMemoryKVStore(), lambda *_: None) == [None, None]
    assert refused
    assert 2 in steps(durable)
    assert not verify(durable, SECOND, "full")


def test_no_host_ends_well_while_what_the_run_protects_is_damaged(nears, durable):
    """The newest is durable, and of the best a host has lost its files."""

    def before_save(world, checkpointer, step) -> None:
        checkpointer._context.promoter._settle()
        if step == 4 and world.rank == 1:
            for key in [one for one in nears[1].objects if one.startswith("checkpoint-2-g1/model")]:
                del nears[1].objects[key]

    ends = run(nears, [View(durable), View(durable)], InMemoryKVStore(), before_save, every=4)
    assert steps(durable) == [4, 3]
    assert all(isinstance(one, RankFailure) for one in ends), ends
    for one in ends:
        assert "checkpoint-2-g1 is saved only in the near tier" in one.message
        assert "missing in every near tier" in one.message
