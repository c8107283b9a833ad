"""A keeper and a near tier: it saves there and promotes, whatever becomes of the trainer."""

from __future__ import annotations

import pytest

from resilient.checkpoint import events
from resilient.checkpoint.catalog import committed
from resilient.checkpoint.daemon.memory import SharedMemoryPool
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.daemon.server import SaverDaemon
from resilient.checkpoint.generations import list_marks
from resilient.checkpoint.promotion import TierPromoter
from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save import persist as tidying
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.distributed.kv_store import KVStoreServer
from resilient.distributed.launch_env import World
from resilient.engine_factory import open_engine
from resilient.errors import StoreUnavailable
from resilient.events import CheckpointRestored, Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from resilient.storage.shared_memory import SharedFolder
from resilient.testing.memory_store import run_ranks
from tests.helpers.hosts import Folded


class Machine:
    """A host: its keeper, and its near tier."""

    def __init__(self, folder) -> None:
        folder.mkdir()
        self.near = str(folder / "near")
        self.path = folder / "keeper"
        self._shared = SharedFolder(folder)
        self.keeper = SaverDaemon(
            self.path, SharedMemoryPool(self._shared), KVStoreServer(), SystemClock()
        )

    def close(self) -> None:
        assert self.keeper.settle(20)
        self.keeper.close()
        self._shared.close()


@pytest.fixture
def machines(tmp_path):
    both = [Machine(tmp_path / name) for name in "ab"]
    yield both
    for one in both:
        one.close()


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "durable")


def steps(url) -> list[int]:
    return [one.step for one in committed(open_store(url))]


class Trainer:
    """One rank of a little run."""

    def __init__(  # noqa: PLR0913 - what tests vary
        self, machine, url, *, scope="0", world=None, board=None, every=3, near=True
    ) -> None:
        self.told = []
        emit = Emitter(SystemClock(), (lambda _, event: self.told.append(event),))
        self.state = Folded(0, is_large=True)
        self.parts = {"model": Part(self.state)}
        self.checkpointer = open_engine(
            url,
            world or World(),
            board,
            emit,
            scope=scope,
            keeper=DaemonAddress(str(machine.path)),
            near_url=machine.near if near else "",
            tiering=TieringOptions(durable_every=every) if near else None,
            within_seconds=20.0,
        )
        resumed = self.checkpointer.resume(self.parts)
        self.began = resumed.step if resumed else 0

    def train(self, until, keep=()) -> None:
        while self.state.steps < until:
            self.state.step()
            self.checkpointer.save(self.state.steps, self.parts, CheckpointInfo(), keep=keep)
            self.checkpointer.wait()

    def said(self, kind) -> list:
        return [one for one in self.told if isinstance(one, kind)]

    def die(self) -> None:
        """End as if killed: the keeper hears that the connection is gone."""
        self.checkpointer._persister._connection.close()
        self.checkpointer._persister._fallback.close()
        self.checkpointer._overlap.close()
        self.checkpointer._context.close()


def unbroken(until) -> list[int]:
    state = Folded(0, is_large=True)
    for _ in range(until):
        state.step()
    return state.ending()


def test_the_keeper_saves_near_and_promotes_what_is_due_and_the_last(machines, url):
    trainer = Trainer(machines[0], url)
    trainer.train(5)
    trainer.checkpointer.close()
    assert not trainer.said(events.DaemonBypassed)
    assert steps(url) == [5, 3, 1]
    assert steps(machines[0].near) == [5, 4]
    assert not verify(open_store(url), committed(open_store(url))[0], "full")


def test_the_keeper_is_asked_to_finish_what_it_saved(machines, url, monkeypatch):
    trainer = Trainer(machines[0], url)
    trainer.train(2)
    own = trainer.checkpointer._context.promoter._promoter
    monkeypatch.setattr(own, "finish", lambda *_: pytest.fail("the trainer did it by itself"))
    trainer.checkpointer.close()
    assert steps(url) == [2, 1]


def test_a_trainer_that_dies_when_it_has_handed_over_loses_nothing(machines, url):
    trainer = Trainer(machines[0], url)
    trainer.train(4)
    trainer.state.step()
    trainer.checkpointer.save(5, trainer.parts, CheckpointInfo())
    trainer.die()
    again = Trainer(machines[0], url, scope="1")
    assert again.began == 5
    (restored,) = again.said(CheckpointRestored)
    assert restored.step == 5
    again.train(6)
    again.checkpointer.close()
    assert again.state.ending() == unbroken(6)
    assert steps(url)[0] == 6
    assert 5 in steps(url), "what a life begins from goes on"


def test_without_its_keeper_the_trainer_saves_near_and_promotes_by_itself(machines, url):
    trainer = Trainer(machines[0], url)
    trainer.train(2)
    trainer.checkpointer._persister._connection.close()
    trainer.train(4)
    assert trainer.said(events.DaemonBypassed)
    trainer.checkpointer.close()
    assert steps(machines[0].near)[:2] == [4, 3]
    assert steps(url)[0] == 4
    assert 2 in steps(url), "what nobody was known to have promoted goes on"


def test_a_keeper_lost_after_the_last_save_leaves_its_promotion_to_the_trainer(machines, url):
    trainer = Trainer(machines[0], url)
    trainer.train(2)
    trainer.checkpointer._persister._connection.close()
    trainer.checkpointer.close()
    assert steps(url) == [2, 1]


def test_what_the_run_protects_is_left_to_the_trainer_with_the_last_save(
    machines, url, monkeypatch
):
    """The keeper is gone when both are committed near, and nothing of it is on its way."""
    trainer = Trainer(machines[0], url)
    trainer.train(1)
    assert machines[0].keeper.settle(20)
    monkeypatch.setattr(TierPromoter, "committed", lambda *_: None)
    trainer.train(3, keep=[CheckpointId(1, 2)])
    trainer.checkpointer._persister._connection.close()
    monkeypatch.undo()
    trainer.checkpointer.close()
    assert steps(url) == [3, 2, 1]


def test_a_mark_that_a_lost_keeper_owed_is_put_by_the_trainer(machines, tmp_path, monkeypatch):
    """Without a near tier: who commits there also marks the life, with its first save alone."""
    store = open_store(str(tmp_path / "single"))

    def full(*_):
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(tidying, "mark_committed", full)
    trainer = Trainer(machines[0], store.url, near=False)
    trainer.train(2)
    assert machines[0].keeper.settle(20)
    monkeypatch.undo()
    assert not list_marks(store)
    trainer.checkpointer._persister._connection.close()
    trainer.train(3)
    assert trainer.said(events.DaemonBypassed)
    trainer.checkpointer.close()
    assert list_marks(store) == [1]


def test_a_damaged_near_copy_is_read_from_the_durable_tier_beside_a_keeper(machines, url):
    trainer = Trainer(machines[0], url, every=1)
    trainer.train(3)
    trainer.checkpointer.close()
    newest = committed(open_store(machines[0].near))[0]
    near = open_store(machines[0].near)
    data = near.get(newest.manifest_key)
    near.put(newest.manifest_key, data[:-9])
    again = Trainer(machines[0], url, scope="1")
    assert again.began == 3
    assert [one.key for one in again.said(events.NearCopyRejected)] == [newest.manifest_key]
    again.checkpointer.close()


def on_both(machines, url, scope, until):
    def rank_main(world, board):
        trainer = Trainer(machines[world.rank], url, scope=scope, world=world, board=board)
        trainer.train(until)
        trainer.checkpointer.close()
        assert not trainer.said(events.DaemonBypassed)
        return trainer.began, trainer.state.ending()

    return run_ranks(2, rank_main)


def test_keepers_of_two_hosts_promote_together_each_its_own_files(machines, url):
    assert on_both(machines, url, "0", 5) == [(0, unbroken(5))] * 2
    assert steps(url) == [5, 3, 1]
    assert [steps(one.near) for one in machines] == [[5, 4], [5, 4]]
    assert on_both(machines[::-1], url, "1", 7) == [(5, unbroken(7))] * 2
    assert not verify(open_store(url), committed(open_store(url))[0], "full")
    newest = committed(open_store(url))[0]
    held = [{one.key for one in open_store(m.near).list(newest.folder)} for m in machines]
    assert held[0] & held[1] == {newest.manifest_key}
