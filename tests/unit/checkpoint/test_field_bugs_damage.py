"""Pains of the field with torn and corrupt checkpoints, each by its report; group A of the list.

TF is huggingface/transformers, PL Lightning-AI/pytorch-lightning, PT pytorch/pytorch, TT
pytorch/torchtitan. Those that need a trainer are in ``tests/unit/train/test_field_bugs_resume.py``.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress

import pytest
import torch

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World
from resilient.errors import IntegrityError, NoIntactCheckpoint, SaveFailed, StoreFull
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import Crash, FaultPlan, FaultyStore, StoreFault, StoreFaultKind
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values
from tests.helpers.mutations import reseal

CLOCK = SystemClock()


def open_one(store, world=None, board=None, told=None, limits=None):
    sinks = () if told is None else (lambda record, event: told.append(event.message()),)
    comms = ControlGroup(board.another() if board else InMemoryKVStore(), world or World(), "life")
    limits = limits or CheckpointOptions(within_seconds=10.0)
    return CheckpointEngine(CheckpointContext(store, comms, limits, CLOCK, Emitter(CLOCK, sinks)))


def parts_of(step):
    return {
        "model": Part(Values(weight=torch.full((64,), float(step)))),
        "trainer_state": Part(Values(global_step=step), document="trainer_state.json"),
        "rng_state": Part(Values(words=torch.tensor([step])), "rank"),
    }


def train(store, steps, told=None, limits=None):
    """Resume, save ``steps``; return the step that it resumed from, None for scratch."""
    checkpointer = open_one(store, told=told, limits=limits)
    parts = parts_of(0)
    try:
        resumed = checkpointer.resume(parts)
        if resumed:
            assert torch.equal(parts["model"].stateful.state["weight"], weight(resumed.step))
        for step in steps:
            checkpointer.save(step, parts_of(step), CheckpointInfo())
        return resumed.step if resumed else None
    finally:
        checkpointer.close()


def weight(step):
    return torch.full((64,), float(step))


def saved(*steps):
    store = MemoryStore()
    train(store, steps)
    return store


def lives_after_each_crash(kind):
    """Yield the step that the next life resumes from, for a death at each operation of a save."""
    at = 0
    while True:
        store = saved(1)
        faulty = FaultyStore(store, FaultPlan(0, (StoreFault(at, kind),)))
        with suppress(Crash):
            train(faulty, (2,))
        if faulty.operations <= at:
            return
        yield train(store, ())
        at += 1


@pytest.mark.parametrize("kind", [StoreFaultKind.CRASH_BEFORE, StoreFaultKind.CRASH_AFTER])
def test_tf_35782_killed_in_mid_save_the_fragment_is_never_chosen(kind):
    resumed = list(lives_after_each_crash(kind))
    assert set(resumed) == {1, 2}
    assert resumed == sorted(resumed), "first the old one, and from the commit on the new one"


def test_tf_35525_a_newest_that_does_not_load_costs_itself_and_is_told():
    store, told = saved(1, 2, 3), []
    key = CheckpointId(1, 3).key("state.json")
    store.objects[key] = b"\0" * len(store.objects[key])
    assert train(store, (), told) == 2
    assert any("skipped checkpoint-3-g1" in line for line in told)
    assert len(committed(store)) == 3, "nobody has to delete a folder by hand, and nothing did"


def test_tf_40790_an_empty_folder_is_a_start_and_a_folder_is_not_complete_by_being_there():
    assert train(MemoryStore(), ()) is None
    store = saved(1)
    for key in [key for key in store.objects if key.startswith("checkpoint-1-")]:
        store.put(key.replace("checkpoint-1-", "checkpoint-9-"), store.objects[key])
    store.delete("checkpoint-9-g1/manifest.json")
    assert train(store, ()) == 1


FILES = ("manifest.json", "state.json", "trainer_state.json", "model.r00000.safetensors",
         "rng_state_0.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_pl_688_a_file_cut_short_anywhere_is_noticed(name):
    store = saved(1, 2)
    key = CheckpointId(1, 2).key(name)
    whole = store.objects[key]
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        store.objects[key] = whole[:length]
        assert train(store, ()) == 1


@pytest.mark.parametrize("victim", ["model.r00001", "rng_state_1"])
def test_pl_20012_a_sharded_save_in_which_one_rank_dies_is_no_checkpoint(victim):
    store = MemoryStore()

    class Dying(FaultyStore):
        def put_new(self, key, data):
            if victim in key and "checkpoint-2-" in key:
                # What came through before the end is there, and it is not whole.
                super().put_new(key, bytes(data)[: len(data) // 2])
                raise StoreFull("the process is gone", key=key)
            super().put_new(key, data)

    def rank_main(world, board):
        checkpointer = open_one(Dying(store), world, board)
        try:
            checkpointer.resume({})
            for step in (1, 2):
                big = Part(Values(weight=torch.full((300, 600), float(step))))
                own = Part(Values(rank=0), "rank")
                checkpointer.save(step, {"model": big, "rng_state": own}, CheckpointInfo())
            with pytest.raises(SaveFailed):
                checkpointer.wait()
        finally:
            checkpointer.close()

    run_ranks(2, rank_main)
    assert committed(store) == [CheckpointId(1, 1)]


class Loses(MemoryStore):
    """Acknowledges everything, and keeps less of what comes from step 2 on."""

    def put_new(self, key, data):
        kept = bytes(data)
        if "checkpoint-2-" in key and "model" in key:
            kept = kept[:-32]
        super().put_new(key, kept)


def test_pt_183878_bytes_that_a_store_acknowledged_and_lost_are_missed_by_size_and_digest():
    store = Loses()
    train(store, (1, 2))
    assert committed(store)[0] == CheckpointId(1, 2), "nothing told the writer"
    assert verify(store, CheckpointId(1, 2), "quick")
    assert train(store, ()) == 1


def flipped(store, checkpoint, name, place=-1):
    key = checkpoint.key(name)
    data = bytearray(store.objects[key])
    data[place] ^= 1
    store.objects[key] = bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_pt_126952_integrity_is_checked_by_every_reader_without_being_asked(name):
    store = saved(1)
    flipped(store, CheckpointId(1, 1), name, 20)
    with pytest.raises(IntegrityError):
        read(store, CheckpointId(1, 1))
    with pytest.raises(NoIntactCheckpoint):
        train(store, ())


def test_tt_4011_a_manifest_that_is_there_does_not_vouch_for_bytes_that_are_not():
    store = saved(1, 2, 3)
    flipped(store, CheckpointId(1, 3), "model.r00000.safetensors")
    key = CheckpointId(1, 2).key("model.r00000.safetensors")
    store.objects[key] = store.objects[key][:-1]
    assert train(store, ()) == 1


@pytest.mark.parametrize("digest", ["", "0", "0" * 32])
def test_safetensors_220_no_digest_means_not_computed(digest):
    """Whoever forges a digest of nothing does not switch the check off."""
    store = saved(1)
    checkpoint = CheckpointId(1, 1)
    fields = json.loads(store.objects[checkpoint.manifest_key])
    name = "model.r00000.safetensors"
    for entry in fields["files"]:
        if entry["name"] == name:
            entry.update(digest=digest, chunks=[digest])
    store.objects[checkpoint.manifest_key] = reseal(fields)
    flipped(store, checkpoint, name)
    with pytest.raises(IntegrityError):
        read(store, checkpoint)
    assert verify(store, checkpoint)


def test_safetensors_220_weights_that_became_nan_by_one_bit_are_not_loaded():
    store = saved(1, 2)
    key = CheckpointId(1, 2).key("model.r00000.safetensors")
    data = store.objects[key]
    store.objects[key] = data[:-4] + torch.tensor([float("nan")]).numpy().tobytes()
    assert train(store, ()) == 1


class Held(MemoryStore):
    """Puts wait until they are let go."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def put_new(self, key, data):
        assert not key.startswith("checkpoint-") or self.go_on.wait(20)
        super().put_new(key, data)


def test_pt_144657_values_that_change_after_the_call_are_not_saved():
    store = Held()
    checkpointer = open_one(store)
    checkpointer.resume({})
    live = {"weight": torch.zeros(64), "view": torch.zeros(64)}
    live["view"] = live["weight"][::2]
    plain = {"steps": [1, 2]}
    parts = {"model": Part(Values(**live)), "plain": Part(Values(**plain))}
    checkpointer.save(1, parts, CheckpointInfo())
    live["weight"].add_(7)
    plain["steps"].append(3)
    store.go_on.set()
    checkpointer.close()
    target = {"model": Part(Values()), "plain": Part(Values())}
    resuming = open_one(store)
    resuming.resume(target)
    resuming.close()
    assert torch.equal(target["model"].stateful.state["weight"], torch.zeros(64))
    assert target["plain"].stateful.state["steps"] == [1, 2]


def full_at(store, at):
    """Save step 2 on a disk that fills up at the ``at``-th put; say whether that was reached."""
    faulty = FaultyStore(store, FaultPlan(0, (StoreFault(at, StoreFaultKind.FULL),)))
    # Where the claim of the life itself finds no room, nothing is begun.
    with suppress(SaveFailed, StoreFull):
        train(faulty, (2,), limits=CheckpointOptions(Retention(keep_last=1), 10.0))
    return faulty.operations > at


def test_pt_10577_a_disk_that_fills_up_costs_that_save_and_leaves_nothing_that_looks_newer():
    at = 0
    while True:
        store = saved(1)
        if not full_at(store, at):
            break
        newest = committed(store)[0]
        assert verify(store, newest) == []
        assert train(store, ()) == newest.step
        at += 1
    assert at >= 6


def test_probe_the_same_step_saved_again_never_mixes_with_the_first():
    """A later life saves a step that was saved before and dies at each of its operations."""
    at = 0
    while True:
        store = saved(1, 2)
        first = {key: one for key, one in store.objects.items() if "checkpoint-2-" in key}
        faulty = FaultyStore(store, FaultPlan(0, (StoreFault(at, StoreFaultKind.CRASH_AFTER),)))
        checkpointer = open_one(faulty)
        with suppress(Crash):
            checkpointer.resume(parts_of(0), ref="checkpoint-1-g1")
            checkpointer.save(2, parts_of(2), CheckpointInfo())
        with suppress(Crash):
            checkpointer.close()
        assert {key: store.objects[key] for key in first} == first
        assert train(store, ()) in (1, 2)
        if faulty.operations <= at:
            break
        at += 1
    assert committed(store)[0] == CheckpointId(2, 2)
