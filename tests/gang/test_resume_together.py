"""Ranks as threads: one fails, one is late, one disagrees, one reads damage."""

from __future__ import annotations

import time

import pytest

from resilient.checkpoint import catalog
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.generations import claim
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup, RankFailure, agree
from resilient.errors import (
    DeadlineExceeded,
    IncompatibleCheckpoint,
    IntegrityError,
    NoIntactCheckpoint,
    ResilientError,
    SaveFailed,
    StoreFull,
    StoreUnavailable,
    UnsavableState,
)
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values


def checkpointer(store, world, board, within_seconds=10.0, told=None):
    sinks = () if told is None else (lambda record, event: told.append(event.message()),)
    emit = Emitter(SystemClock(), sinks)
    comms = ControlGroup(board.another(), world, "life")
    limits = CheckpointOptions(within_seconds=within_seconds)
    return CheckpointEngine(CheckpointContext(store, comms, limits, SystemClock(), emit))


def parts_of(world, step=0):
    return {
        "model": Part(Values(step=step)),
        "rng_state": Part(Values(seen=[world.rank, step]), "rank"),
    }


def train(store, ranks, steps, told=None):
    """Resume and save ``steps`` more; return what each rank resumed with."""

    def rank_main(world, board):
        one = checkpointer(store, world, board, told=told)
        try:
            parts = parts_of(world)
            resumed = one.resume(parts)
            start = resumed.step if resumed else 0
            for step in range(start + 1, start + steps + 1):
                one.save(step, parts_of(world, step), CheckpointInfo())
            one.wait()
            return start, {name: part.stateful.state for name, part in parts.items()}
        finally:
            one.close()

    return run_ranks(ranks, rank_main)


def test_every_rank_gets_its_own_part_back():
    store = MemoryStore()
    train(store, 3, 2)
    resumed = train(store, 3, 1)
    assert [start for start, _ in resumed] == [2, 2, 2]
    assert [state["rng_state"]["seen"] for _, state in resumed] == [[0, 2], [1, 2], [2, 2]]


def test_damage_that_only_one_rank_reads_sends_all_ranks_back():
    store, told = MemoryStore(), []
    train(store, 2, 3)
    key = CheckpointId(1, 3).key("rng_state_1.safetensors")
    store.objects[key] = store.objects[key][:-1] + b"\0"
    resumed = train(store, 2, 1, told)
    assert [start for start, _ in resumed] == [2, 2]
    assert any("skipped checkpoint-3-g1: rank 1 found" in line for line in told)


def test_with_all_damaged_every_rank_refuses_with_exit_code_3():
    store = MemoryStore()
    train(store, 2, 2)
    for checkpoint in catalog.committed(store):
        key = checkpoint.key("state.json")
        store.objects[key] = b"x" + store.objects[key][1:]
    with pytest.raises(NoIntactCheckpoint, match="does not start over silently") as caught:
        train(store, 2, 1)
    assert caught.value.exit_code == 3
    assert len(catalog.committed(store)) == 2


class Failing(MemoryStore):
    """Fails puts or gets of keys with a given text."""

    def __init__(self, text, error, on="put") -> None:
        super().__init__()
        self._text, self._error, self._on = text, error, on
        self.armed = True

    def put(self, key, data):
        self._fail(key)
        super().put(key, data)

    def put_new(self, key, data):
        self._fail(key)
        super().put_new(key, data)

    def _fail(self, key):
        if self.armed and self._on == "put" and self._text in key:
            raise self._error

    def get(self, key):
        if self.armed and self._on == "get" and self._text in key:
            raise self._error
        return super().get(key)


def test_a_store_that_fails_says_nothing_about_a_checkpoint():
    store = Failing("rng_state_1", StoreUnavailable("asleep"), on="get")
    train(store, 2, 2)
    with pytest.raises(StoreUnavailable, match="rank 1: asleep"):
        train(store, 2, 1)
    store.armed = False
    assert train(store, 2, 1)[0][0] == 2


def test_a_full_disk_on_one_rank_fails_the_save_everywhere_and_frees_what_was_written():
    store, told = Failing("rng_state_1", StoreFull("no space", hint="free some")), []
    with pytest.raises(
        SaveFailed, match="rank 1: no space; older checkpoints are intact"
    ) as caught:
        train(store, 2, 1, told)
    assert caught.value.exit_code == 73
    assert caught.value.hint == "free some"
    assert [key for key in store.objects if "checkpoint" in key] == []
    assert any("checkpoint-1-g1 was not saved" in line for line in told)


def test_after_a_failed_save_the_next_one_works():
    store = Failing("checkpoint-1-", StoreFull("no space"))

    def rank_main(world, board):
        one = checkpointer(store, world, board)
        parts = parts_of(world)
        one.resume(parts)
        one.save(1, parts, CheckpointInfo())
        with pytest.raises(SaveFailed):
            one.save(2, parts, CheckpointInfo())
        one.save(2, parts, CheckpointInfo())
        one.close()

    run_ranks(2, rank_main)
    assert catalog.committed(store) == [CheckpointId(1, 2)]


def test_a_value_that_only_pickle_could_save_is_named_at_save_time():
    def rank_main(world, board):
        one = checkpointer(MemoryStore(), world, board)
        one.resume({})
        try:
            one.save(1, {"callbacks": Part(Values(hook=[lambda: 0]))}, CheckpointInfo())
        finally:
            one.close()

    with pytest.raises(UnsavableState, match=r"`callbacks/hook/0` is a builtins\.function"):
        run_ranks(1, rank_main)


def test_a_missing_part_is_refused_unless_it_is_optional():
    store = MemoryStore()
    train(store, 1, 1)

    def rank_main(world, board):
        one = checkpointer(store, world, board)
        try:
            return one.resume({**parts_of(world), "scaler": Part(Values(), optional=optional)})
        finally:
            one.close()

    optional = False
    with pytest.raises(IncompatibleCheckpoint, match="holds no `scaler`"):
        run_ranks(1, rank_main)
    optional = True
    assert run_ranks(1, rank_main)[0].absent == ("scaler",)


def test_a_silent_rank_is_named_when_the_deadline_passes():
    def rank_main(world, board):
        comms = ControlGroup(board, world, "s")
        if world.rank == 1:
            time.sleep(0.4)
            return None
        return agree(comms, "t", 1, sum, 0.2)

    with pytest.raises(
        DeadlineExceeded, match=r"ranks \[1\] did not answer within 0.2 s"
    ) as caught:
        run_ranks(2, rank_main)
    for said in ("same command again", "0.2 s apart", "save_within_seconds=", " within_seconds="):
        assert said in caught.value.hint


def test_the_first_ranks_failure_reaches_everyone_at_once():
    def rank_main(world, board):
        mine = RankFailure("RES-STORE-507", "disk full", "buy one") if world.rank == 2 else 1
        began = time.monotonic()
        with pytest.raises(ResilientError) as caught:
            agree(ControlGroup(board, world, "s"), "t", mine, sum, 30.0)
        assert time.monotonic() - began < 5
        return type(caught.value), caught.value.message, caught.value.hint

    assert set(run_ranks(3, rank_main)) == {(StoreFull, "rank 2: disk full", "buy one")}


def test_a_rule_that_fails_fails_everyone():
    def rule(_shown):
        raise StoreFull("at the last moment")

    def rank_main(world, board):
        with pytest.raises(StoreFull):
            agree(ControlGroup(board, world, "s"), "t", 1, rule, 5.0)

    run_ranks(3, rank_main)


def test_a_refusal_names_what_is_whole_though_abandoned():
    store = MemoryStore()
    train(store, 1, 3)
    claim(store, CheckpointId(1, 1), cause="rollback", clock=SystemClock())
    store.delete(CheckpointId(1, 1).manifest_key)
    with pytest.raises(NoIntactCheckpoint) as caught:
        train(store, 1, 1)
    assert "--resume checkpoint-3-g1" in caught.value.hint


def test_ranks_that_save_different_steps_are_told_and_nothing_is_committed():
    store = MemoryStore()

    def rank_main(world, board):
        one = checkpointer(store, world, board)
        one.resume({})
        one.save(10 + world.rank, parts_of(world), CheckpointInfo())
        with pytest.raises(SaveFailed, match="ranks save different steps at the same time"):
            one.close()

    run_ranks(2, rank_main)
    assert catalog.committed(store) == []


def test_with_every_manifest_gone_it_refuses_to_start_over():
    store = MemoryStore()
    train(store, 2, 1)
    for checkpoint in catalog.committed(store):
        store.delete(checkpoint.manifest_key)
    with pytest.raises(NoIntactCheckpoint):
        train(store, 2, 1)


def test_starting_over_beside_checkpoints_says_so():
    store, told = MemoryStore(), []
    train(store, 1, 2)

    def rank_main(world, board):
        one = checkpointer(store, world, board, told=told)
        one.resume({}, ref="never")
        one.close()

    run_ranks(1, rank_main)
    assert any("started over: 2 committed checkpoints are kept" in line for line in told)
    assert train(store, 1, 1)[0][0] == 2, "a life that saved nothing hides nothing"


class ReadsDamage(MemoryStore):
    """The same objects, of which one host reads other bytes."""

    def get(self, key):
        data = super().get(key)
        return data[:-1] + b"\0" if "manifest" not in key else data


def test_a_part_that_one_rank_cannot_read_is_loaded_by_none():
    store = MemoryStore()
    train(store, 2, 2)
    damaged = ReadsDamage()
    damaged.objects = store.objects

    def rank_main(world, board):
        one = checkpointer(damaged if world.rank else store, world, board)
        model = Values(step=-1)
        try:
            with pytest.raises(IntegrityError, match="rank 1: `checkpoint-1-g1/"):
                one.load_part(CheckpointId(1, 1), "model", Part(model))
        finally:
            one.close()
        return model.state

    assert [state["step"] for state in run_ranks(2, rank_main)] == [-1, -1]
