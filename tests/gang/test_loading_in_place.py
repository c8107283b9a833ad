"""Ranks that read into live memory: damage that one finds when another has all of it in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore import read
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.errors import ConfigError, IntegrityError, NoIntactCheckpoint, StoreUnavailable
from resilient.events import Emitter
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore, run_ranks

ROWS, COLUMNS = 1500, 1000  # of the moments, each rank writes more than a chunk


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    """A small file is read into memory of its own, whoever wants it."""
    monkeypatch.setattr(read, "SMALL_BYTES", 0)


def pattern(shape, value):
    return (torch.arange(COLUMNS, dtype=torch.float32) + value).expand(shape)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.b = nn.Parameter(torch.zeros(COLUMNS))


class Live:
    """A model and its optimizer after one step, all of one value."""

    def __init__(self, value):
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        for one in self.model.parameters():
            one.grad = torch.ones_like(one)
        self.optimizer.step()
        self.fill(value)

    def fill(self, value):
        with torch.no_grad():
            for one in self.tensors():
                one.copy_(pattern(one.shape, value))

    def tensors(self):
        moments = [
            one
            for state in self.optimizer.state.values()
            for kind, one in state.items()
            if kind != "step"
        ]
        return [*self.model.parameters(), *moments]

    def parts(self):
        named = NamedOptimizer(self.model, self.optimizer)
        return {"model": Part(self.model), "optimizer": Part(named)}

    def holds(self, value):
        return all(torch.equal(one, pattern(one.shape, value)) for one in self.tensors())


def checkpointer(store, world, board, **limits):
    emit = Emitter(SystemClock(), ())
    comms = ControlGroup(board.another(), world, "life")
    desk = CheckpointContext(
        store, comms, CheckpointOptions(within_seconds=20.0, **limits), SystemClock(), emit
    )
    return CheckpointEngine(desk)


@pytest.fixture(scope="module")
def saved():
    """Two checkpoints of two ranks: all of step n begins at n."""
    store = MemoryStore()

    def rank_main(world, board):
        one, live = checkpointer(store, world, board, save_unchanged="write"), Live(0)
        one.resume(live.parts(), ref="never")
        for step in (1, 2):
            live.fill(step)
            one.save(step, live.parts(), CheckpointInfo())
        one.close()

    run_ranks(2, rank_main)
    return store


@pytest.fixture
def store(saved):
    copy = MemoryStore()
    copy.objects.update(saved.objects)
    return copy


def files_of(store, step):
    return sorted(
        key
        for key in store.objects
        if key.startswith(CheckpointId(1, step).key("")) and key.endswith(".safetensors")
    )


def damage(store, key, place=-1):
    data = bytearray(store.objects[key])
    data[place] ^= 1
    store.objects[key] = bytes(data)


class OneEye(MemoryStore):
    """What rank 1 reads of some files is damaged; rank 0 reads what is stored."""

    def __init__(self, objects, keys):
        super().__init__()
        self.objects = objects
        self.keys = keys

    def get_range(self, key, start, length):
        data = bytearray(super().get_range(key, start, length))
        if key in self.keys and data:
            data[-1] ^= 1
        return bytes(data)


def resumed(stores, *, lives=None, ref="auto", **limits):
    """Let two ranks resume, each from its view of the store; return what they then hold."""

    def rank_main(world, board):
        one = checkpointer(stores[world.rank], world, board, **limits)
        live = lives[world.rank] if lives else Live(77)
        try:
            found = one.resume(live.parts(), ref=ref)
        finally:
            one.close()
        return found.step, [value for value in (1, 2, 77) if live.holds(value)]

    return run_ranks(2, rank_main)


def test_what_was_saved_is_in_the_same_memory_again_and_nothing_was_added(store):
    lives = [Live(77), Live(77)]
    before = [[one.data_ptr() for one in live.tensors()] for live in lives]
    assert resumed([store, store], lives=lives) == [(2, [2]), (2, [2])]
    after = [[one.data_ptr() for one in live.tensors()] for live in lives]
    assert after == before


@pytest.mark.parametrize("which", range(2))
def test_damage_that_one_rank_finds_late_is_overwritten_on_the_rank_that_found_none(store, which):
    shaky = OneEye(store.objects, files_of(store, 2)[-1 - which :])
    assert resumed([store, shaky]) == [(1, [1]), (1, [1])]


def test_damage_at_rest_is_overwritten_too(store):
    damage(store, files_of(store, 2)[0])
    assert resumed([store, store]) == [(1, [1]), (1, [1])]


def test_a_process_without_optimizer_state_resumes_the_same(store):
    damage(store, files_of(store, 2)[-1])

    def rank_main(world, board):
        one, live = checkpointer(store, world, board), Live(77)
        live.optimizer.state.clear()
        one.resume(live.parts())
        one.close()
        return live.holds(1)

    assert run_ranks(2, rank_main) == [True, True]


def test_with_nothing_whole_it_says_what_is_in_memory_and_saves_nothing(store):
    for step in (1, 2):
        damage(store, files_of(store, step)[-1])
    before = dict(store.objects)

    def rank_main(world, board):
        one, live = checkpointer(store, world, board), Live(77)
        with pytest.raises(NoIntactCheckpoint, match="may hold parts of it: do not use them"):
            one.resume(live.parts())
        assert not live.holds(77), "else there is nothing to refuse"
        with pytest.raises(ConfigError, match="cannot save before `resume` has returned"):
            one.save(3, live.parts(), CheckpointInfo())
        one.close()

    run_ranks(2, rank_main)
    assert store.objects == before


class Asleep(MemoryStore):
    def __init__(self, objects):
        super().__init__()
        self.objects = objects

    def get_range(self, key, start, length):
        raise StoreUnavailable("asleep")


def test_a_store_that_fails_one_rank_stops_the_one_that_has_all_in_place(store):
    with pytest.raises(StoreUnavailable, match="rank 1: asleep"):
        resumed([store, Asleep(store.objects)])


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_one_part_is_loaded_on_all_ranks_or_left_as_it_was_on_all(store, name):
    shaky = OneEye(store.objects, files_of(store, 2))

    def rank_main(world, board):
        one = checkpointer([store, shaky][world.rank], world, board)
        live = Live(77)
        one.resume(Live(0).parts(), ref="checkpoint-1-g1")
        with pytest.raises(IntegrityError, match="rank 1: "):
            one.load_part(CheckpointId(1, 2), name, live.parts()[name])
        assert live.holds(77)
        one.load_part(CheckpointId(1, 1), name, live.parts()[name])
        assert not live.holds(77)
        one.close()

    run_ranks(2, rank_main)


class Wider(Live):
    def __init__(self, value):
        super().__init__(value)
        self.model.more = nn.Parameter(torch.zeros(COLUMNS, 100))


def test_a_model_that_cannot_take_it_is_not_read_into(store):
    damage(store, files_of(store, 1)[0])
    damage(store, files_of(store, 2)[0])

    def rank_main(world, board):
        one, live = checkpointer(store, world, board), Wider(77)
        with pytest.raises(NoIntactCheckpoint):
            one.resume({"model": live.parts()["model"]})
        one.close()
        return torch.equal(live.model.w, pattern(live.model.w.shape, 77))

    assert run_ranks(2, rank_main) == [True, True]


def test_every_chunk_of_the_newest_damaged_in_turn_leaves_the_older_whole(store):
    for key in files_of(store, 2):
        for start in range(0, len(store.objects[key]), CHUNK_BYTES):
            damage(store, key, start)
            assert resumed([store, store]) == [(1, [1]), (1, [1])], (key, start)
            damage(store, key, start)
