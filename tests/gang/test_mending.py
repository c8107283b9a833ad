"""Ranks resume from a damaged checkpoint: parity gives back what each of them misses."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.save.persist import with_margin
from resilient.checkpoint.verify import verify
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.errors import SaveFailed
from resilient.events import Emitter
from resilient.format.keys import CheckpointId
from resilient.format.parity import parity_bytes
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import FaultPlan, FaultyStore, StoreFault, StoreFaultKind
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values

NEWEST = CheckpointId(1, 3)
OWN = [NEWEST.key("model.r00001.safetensors"), NEWEST.key("rng_state_1.safetensors")]


def parts_of(world, step=0):
    weight = torch.arange(200_000, dtype=torch.float32) * step
    return {
        "model": Part(Values(weight=weight, step=step)),
        "rng_state": Part(Values(seen=torch.tensor([world.rank, step])), "rank"),
    }


def opened(store, world, board, told, **limits):
    emit = Emitter(SystemClock(), (lambda record, event: told.append(event),))
    comms = ControlGroup(board.another(), world, "life")
    return CheckpointEngine(
        CheckpointContext(store, comms, CheckpointOptions(**limits), SystemClock(), emit)
    )


def train(store, ranks=2, steps=(1, 2, 3), told=None, **limits):
    """Resume, save ``steps``; return what each rank resumed with."""
    told = [] if told is None else told

    def rank_main(world, board):
        one = opened(store, world, board, told, **limits)
        try:
            parts = parts_of(world)
            resumed = one.resume(parts)
            for step in steps:
                one.save(step, parts_of(world, step), CheckpointInfo())
            one.wait()
            state = {name: part.stateful.state for name, part in parts.items()}
            return resumed and resumed.checkpoint, state
        finally:
            one.close()

    return run_ranks(ranks, rank_main)


def events_named(told, name):
    return [event for event in told if type(event).__name__ == name]


@pytest.mark.parametrize("lost", OWN)
def test_what_one_rank_misses_is_computed_back_and_all_resume_from_the_newest(lost):
    store, told = MemoryStore(), []
    train(store, parity=1)
    store.delete(lost)
    before = dict(store.objects)
    resumed = train(store, steps=(), told=told)
    assert [checkpoint for checkpoint, _ in resumed] == [NEWEST, NEWEST]
    for rank, (_, state) in enumerate(resumed):
        expected = torch.arange(200_000, dtype=torch.float32) * 3
        assert torch.equal(state["model"]["weight"], expected)
        assert state["rng_state"]["seen"].tolist() == [rank, 3]
    mended = events_named(told, "CheckpointReconstructed")
    assert {event.checkpoint for event in mended} == {NEWEST.folder}
    assert {file for event in mended for file in event.files} == {lost.partition("/")[2]}
    assert "resilient ckpt repair checkpoint-3-g1" in mended[0].message()
    assert all(store.objects[key] == data for key, data in before.items()), "mended in memory"


@pytest.mark.parametrize(
    ("lost", "limits"),
    [(OWN[:1], {"repair_on_restore": False}), (OWN, {})],
    ids=["it is not wanted", "too much is lost"],
)
def test_otherwise_all_ranks_go_back_together(lost, limits):
    store, told = MemoryStore(), []
    train(store, parity=1)
    for key in lost:
        store.delete(key)
    resumed = train(store, steps=(), told=told, **limits)
    assert {checkpoint for checkpoint, _ in resumed} == {CheckpointId(1, 2)}
    assert events_named(told, "CheckpointReconstructed") == []


def test_what_was_computed_back_is_never_referred_to():
    """Its bytes in the store are damaged still: the next save writes them anew."""
    store = MemoryStore()

    def life(steps):
        def rank_main(world, board):
            one = opened(store, world, board, [], parity=1)
            frozen = Part(Values(weight=torch.arange(50_000.0)))
            try:
                one.resume({"model": frozen})
                for step in steps:
                    one.save(step, {"model": frozen}, CheckpointInfo())
            finally:
                one.close()

        run_ranks(1, rank_main)

    life([1])
    key = CheckpointId(1, 1).key("model.r00000.safetensors")
    whole, store.objects[key] = store.objects[key], store.objects[key][:-1] + b"\x7f"
    life([2])
    assert verify(store, CheckpointId(2, 2)) == []
    store.objects[key] = whole
    life([3])
    origins = {one.origin for one in read_manifest(store, CheckpointId(3, 3)).files}
    assert CheckpointId(2, 2) in origins, "what is whole is referred to"


def test_the_copy_of_a_damaged_manifest_serves_all_ranks():
    store = MemoryStore()
    train(store, parity=1)
    store.objects[NEWEST.manifest_key] = store.objects[NEWEST.manifest_key][:-3]
    assert {one for one, _ in train(store, steps=())} == {NEWEST}
    store.objects[NEWEST.manifest_key] = b""
    del store.objects[NEWEST.copy_key]
    assert {one for one, _ in train(store, steps=())} == {CheckpointId(1, 2)}


def test_a_deleted_manifest_is_not_taken_from_its_copy():
    """What a rotation let go is gone, whatever lies there still."""
    store = MemoryStore()
    train(store, parity=1)
    store.delete(NEWEST.manifest_key)
    assert {one for one, _ in train(store, steps=())} == {CheckpointId(1, 2)}


def test_a_copy_that_cannot_be_put_is_told_and_the_save_stands():
    store, told = MemoryStore(), []
    faulty = FaultyStore(store)
    train(faulty, ranks=1, steps=(1,), parity=1)
    at = faulty.trace.index(("put", CheckpointId(1, 1).copy_key))
    store = MemoryStore()
    plan = FaultPlan(0, (StoreFault(at, StoreFaultKind.FULL),))
    train(FaultyStore(store, plan), ranks=1, steps=(1,), told=told, parity=1)
    assert committed(store) == [CheckpointId(1, 1)]
    assert CheckpointId(1, 1).copy_key not in store.objects
    (event,) = events_named(told, "ManifestCopyFailed")
    assert "resilient ckpt repair checkpoint-1-g1" in event.message()


def test_the_look_for_room_counts_the_parity():
    store = MemoryStore()
    train(store, ranks=1, steps=(1,), parity=2)
    manifest = read_manifest(store, CheckpointId(1, 1))
    sizes = [one.size_bytes for one in manifest.files if not one.name.endswith(".parity")]
    assert manifest.size_bytes == sum(sizes) + parity_bytes(sizes, 2)
    needed = with_margin(manifest.size_bytes)
    for free, fits in ((needed, True), (needed - 1, False)):
        roomy = MemoryStore()
        roomy.free_bytes = lambda free=free: free
        if fits:
            train(roomy, ranks=1, steps=(1,), parity=2)
        else:
            with pytest.raises(SaveFailed, match="not enough space"):
                train(roomy, ranks=1, steps=(1,), parity=2)
