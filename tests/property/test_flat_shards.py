"""Tensors that are cut between any two elements, as by ZeRO: saved and loaded at any cuts."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save.persist import write
from resilient.distributed.launch_env import World
from resilient.errors import UnsavableState
from resilient.format.regions import flat_regions
from resilient.state_dict.resharding import LoadPlan, load
from resilient.state_dict.sharding import FlatShard
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, empty_manifest
from tests.property.test_placement import CHECKPOINT, fake_rank

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_run_of_elements_is_a_few_boxes_in_its_own_order(shape, data):
    flat = torch.arange(math.prod(shape))
    start = data.draw(st.integers(0, len(flat)))
    count = data.draw(st.integers(0, len(flat) - start))
    boxes = flat_regions(shape, start, count)
    held = [
        number
        for box in boxes
        for number in flat.view(shape)[
            tuple(slice(a, a + n) for a, n in zip(box.offsets, box.lengths, strict=True))
        ].flatten()
    ]
    assert held == list(range(start, start + count))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def cuts_of(data, length):
    edges = data.draw(st.lists(st.integers(0, length), min_size=1, max_size=3))
    return list(pairwise([0, *sorted(edges), length]))


def shard(whole, first, stop):
    """Return one rank's part, in the middle of memory that holds other things too."""
    memory = torch.full((whole.numel() + 3,), -1.0, dtype=whole.dtype)
    memory[2 : 2 + stop - first] = whole.reshape(-1)[first:stop]
    return FlatShard(whole.shape, first, memory[2 : 2 + stop - first])


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.data())
def test_saved_at_any_cuts_and_loaded_at_any_other(shape, data):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    store, receipts, saving = MemoryStore(), [], cuts_of(data, whole.numel())
    for rank, (first, stop) in enumerate(saving):
        with fake_rank(rank, (len(saving),)):
            part = shard(whole, first, stop)
            parts = {"model": Part(Values(w=part, tied=part))}
            staged = stage(capture(7, parts, rank), World(rank, len(saving)), StagingBuffers())
            receipts.append(write(store, CHECKPOINT, rank, staged.files, staged.parts))
    # Refuses holes and elements that two ranks wrote.
    commit(store, gather_receipts(empty_manifest(CHECKPOINT), receipts))
    loading = cuts_of(data, whole.numel())
    for rank, (first, stop) in enumerate(loading):
        with fake_rank(rank, (len(loading),)):
            live = shard(torch.zeros_like(whole), first, stop)
            target = Values(w=live, tied=live)
            parts = {"model": Part(target)}
            landing = LoadPlan(parts)
            proved = read(store, CHECKPOINT, {"model"}, landing.boxes)
            assert [entry.name for entry in proved.manifest.tensors] == ["model/w"]
            load(proved.manifest, proved.files, parts, rank, landing)
            assert torch.equal(live.memory, whole.reshape(-1)[first:stop]), "filled where it lies"
            assert target.state["w"] is target.state["tied"]


def test_two_parameters_of_which_a_rank_holds_nothing_are_not_taken_for_tied():
    with fake_rank(0, (1,)):
        memory = torch.ones(4)
        state = Values(a=FlatShard((3,), 0, memory[:0]), b=FlatShard((3,), 0, memory[:0]))
        (part,) = capture(1, {"model": Part(state)}, 0).parts
    assert sorted(part.tensors) == ["model/a", "model/b"]


def test_a_part_of_a_tensor_cannot_be_computed_with_or_saved_as_one_of_a_rank():
    part = FlatShard((4,), 1, torch.ones(2))
    with pytest.raises(NotImplementedError, match="whole tensor"):
        part + 1
    assert "holds=1:3" in repr(part)
    with pytest.raises(UnsavableState, match="sharded over ranks"):
        capture(1, {"mine": Part(Values(w=part), "rank")}, 0)
