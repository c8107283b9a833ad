"""Round trips and arithmetic that must hold for any input."""

from __future__ import annotations

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.retention import Retention, RetentionInput, plan_rotation
from resilient.checkpoint.save.persist import write
from resilient.distributed.launch_env import World
from resilient.errors import IncompatibleCheckpoint, IntegrityError
from resilient.format.digest import CHUNK_BYTES, damaged_ranges, digest_file
from resilient.format.document import canonical, seal, unseal
from resilient.format.keys import CheckpointId, parse_checkpoint
from resilient.format.regions import Region, covers, intersect, row_runs, whole
from resilient.state_dict.flatten import flatten, unflatten
from resilient.state_dict.resharding import load
from resilient.state_dict.save_planner import TensorSpec, partition
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
KEYS = st.text(string.ascii_letters + "./~$@ ", min_size=1, max_size=6)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
    | st.binary(max_size=4) | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(KEYS | st.integers(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(st.dictionaries(st.text(max_size=6).filter(lambda key: key != "root"), JSON, max_size=4))
def test_a_sealed_document_opens_to_what_was_sealed(fields):
    opened = unseal(seal(fields), "k")
    assert {**opened, "root": None} == {**fields, "root": None}


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_any_flipped_bit_of_a_document_is_found(position, bit):
    data = bytearray(seal({"name": "stra\xdfe", "number": 1.5, "list": [1, None, True]}))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(IntegrityError):
        unseal(bytes(data), "k")


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_never_crashes(data):
    with pytest.raises(IntegrityError):
        unseal(data, "k")


@given(st.integers(1, 10**9), st.integers(0, 10**9))
def test_names_spell_what_they_parse(generation, step):
    checkpoint = CheckpointId(generation, step)
    assert parse_checkpoint(checkpoint.folder) == checkpoint


@given(PLAIN)
def test_a_tree_comes_back_as_it_was(value):
    import json

    tree, tensors = flatten("part", value)
    assert tensors == {}
    again = unflatten(json.loads(json.dumps(tree, allow_nan=False)), tensors.__getitem__)
    assert again == value
    assert repr(again) == repr(value)


@given(SHAPES, st.data())
def test_runs_read_a_box_row_by_row(shape, data):
    if 0 in shape:
        return
    offsets = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    lengths = tuple(
        data.draw(st.integers(1, extent - offset))
        for extent, offset in zip(shape, offsets, strict=True)
    )
    box = Region(offsets, lengths)
    tensor = torch.arange(whole(shape).size).reshape(shape)
    flat = tensor.flatten()
    runs = [flat[start : start + count] for start, count in row_runs(whole(shape), box)]
    slices = tuple(slice(start, start + n) for start, n in zip(offsets, lengths, strict=True))
    assert torch.equal(torch.cat(runs), tensor[slices].flatten())
    assert intersect(box, whole(shape)) == box


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(1, 7))
def test_a_partition_writes_every_element_once(shapes, ranks):
    # Large enough that rows are split: sizes are scaled by the first axis.
    specs = [
        TensorSpec(f"t{number}", "F64", (shape[0] * 9000, *shape[1:]) if shape else ())
        for number, shape in enumerate(shapes)
    ]
    shares = partition(specs, ranks)
    assert len(shares) == ranks
    for spec in specs:
        regions = [region for share in shares for one, region in share if one == spec]
        assert covers(spec.shape, regions)


@settings(deadline=None, max_examples=40)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 2**32))
def test_saved_by_any_world_and_loaded_whole_by_any_other(shapes, ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(40000,), *shapes]
    tensors = {
        f"layer.{number}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for number, shape in enumerate(shapes)
    }
    store = MemoryStore()
    receipts = []
    for rank in range(ranks):
        parts = {"model": Part(Held(tensors))}
        staged = stage(capture(7, parts, rank), World(rank, ranks), StagingBuffers())
        receipts.append(write(store, CheckpointId(1, 7), rank, staged.files, staged.parts))
    from tests.helpers.manifests import empty_manifest

    commit(store, gather_receipts(empty_manifest(CheckpointId(1, 7)), receipts))
    proved = read(store, CheckpointId(1, 7))
    target = Held({})
    load(proved.manifest, proved.files, {"model": Part(target)}, 0)
    assert list(target.state) == list(tensors)
    assert all(torch.equal(target.state[name], tensors[name]) for name in tensors)


class Held:
    def __init__(self, state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


IDS = st.builds(CheckpointId, st.integers(1, 3), st.integers(0, 9))


@given(st.sets(IDS), st.sets(IDS), st.integers(1, 5), st.sets(IDS))
def test_retention_never_goes_below_its_number(line, abandoned, limit, keep):
    line = sorted(line, reverse=True)
    abandoned = sorted(abandoned - set(line), reverse=True)
    plan = plan_rotation(Retention(limit), RetentionInput(line, abandoned, keep=keep))
    everything = {*line, *abandoned}
    assert set(plan.doomed) | set(plan.kept) == everything
    assert not set(plan.doomed) & set(plan.kept)
    assert len(plan.kept) >= min(limit, len(everything))
    assert set(keep) & everything <= set(plan.kept)
    if line:
        assert line[0] in plan.kept
    if set(plan.kept) & set(abandoned) - set(keep):
        assert set(line) <= set(plan.kept), "an abandoned one never takes a place in the line"


@given(st.integers(0, 3 * CHUNK_BYTES), st.integers(0, 7))
@settings(max_examples=10, deadline=None)
def test_damage_is_located_in_its_chunk(position, bit):
    data = bytearray(3 * CHUNK_BYTES + 17)
    proof = digest_file(data)
    data[position] ^= 1 << bit
    (damaged,) = damaged_ranges(data, proof)
    assert damaged[0] <= position < damaged[1]
    assert damaged[1] - damaged[0] <= CHUNK_BYTES


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3))
def test_a_document_of_another_version_is_incompatible_not_damaged(fields):
    from resilient.format.manifest import decode

    data = seal({**fields, "format": "resilient-checkpoint", "version": 99})
    with pytest.raises(IncompatibleCheckpoint):
        decode(data, "checkpoint-1-g1/manifest.json")
    assert canonical(1) == b"1\n"
