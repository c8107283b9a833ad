"""A rank stores and reads the same elements as with torch's DTensor, for any mesh and placement."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save.persist import write
from resilient.distributed.launch_env import World
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.format.regions import Region, intersect, spans, whole
from resilient.state_dict.resharding import LoadPlan, load
from resilient.state_dict.sharding import axis_runs
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, empty_manifest

CHECKPOINT = CheckpointId(1, 7)
MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)
SHAPES = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@contextmanager
def fake_rank(rank, mesh_shape):
    """One rank of a world that is not there, and its mesh."""
    size = math.prod(mesh_shape)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        # DTensor keeps meshes that look alike for one; the names tell those of two ranks apart.
        names = tuple(f"{axis}_of_{rank}" for axis in "ab"[: len(mesh_shape)])
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@st.composite
def layouts(draw, dimensions):
    mesh = draw(MESHES)
    shards = st.integers(0, dimensions - 1).map(Shard)
    return mesh, [draw(st.just(Replicate()) | shards) for _ in mesh]


@settings(deadline=None)
@given(st.integers(0, 40), st.data())
def test_runs_of_an_axis_are_what_torch_splits_off(size, data):
    mesh = data.draw(MESHES)
    strided = st.integers(1, 4).map(lambda factor: _StridedShard(0, split_factor=factor))
    kinds = st.sampled_from([Shard(0), Shard(1), Replicate()]) | strided
    placements = [data.draw(kinds) for _ in mesh]
    seen = []
    for number in range(math.prod(mesh)):
        coordinate = [number // mesh[1], number % mesh[1]] if len(mesh) == 2 else [number]
        index = torch.arange(size)
        for placement, ranks, at in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, Shard | _StridedShard) and placement.dim == 0:
                index = placement._split_tensor(index, ranks, with_padding=False)[0][at]
        runs = axis_runs(size, 0, placements, mesh, coordinate)
        held = [place for first, count in runs for place in range(first, first + count)]
        assert held == index.tolist()
        seen += held
    copies = {seen.count(place) for place in range(size)}
    assert len(copies) <= 1
    assert 0 not in copies


@settings(deadline=None, max_examples=60)
@given(SHAPES, st.data())
def test_saved_on_any_mesh_and_loaded_on_any_other(shape, data):
    saving, loading = (data.draw(layouts(len(shape))) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    full = torch.randn(shape, generator=generator, dtype=torch.float64)
    plain = torch.randn((5, 2), generator=generator)
    store = save_on(saving, {"w": full, "plain": plain})
    mesh_shape, placements = loading
    for rank in range(math.prod(mesh_shape)):
        with fake_rank(rank, mesh_shape) as mesh:
            right = distribute_tensor(full, mesh, placements, src_data_rank=None)
            target = Values(
                w=distribute_tensor(torch.zeros_like(full), mesh, placements, src_data_rank=None),
                plain=torch.zeros(5, 2),
            )
            memory = target.state["w"].to_local()
            parts = {"model": Part(target)}
            landing = LoadPlan(parts)
            proved = read(store, CHECKPOINT, {"model"}, landing.boxes)
            load(proved.manifest, proved.files, parts, rank, landing)
            assert torch.equal(memory, right.to_local()), "the live memory itself is filled"
            assert torch.equal(target.state["w"].to_local(), right.to_local())
            assert torch.equal(target.state["plain"], plain)
    alone = {"model": Part(Values())}
    proved = read(store, CHECKPOINT)
    load(proved.manifest, proved.files, alone, 0)
    assert torch.equal(alone["model"].stateful.state["w"], full)


def save_on(layout, tensors):
    """Commit ``w`` sharded and the rest replicated, one imaginary rank after the other."""
    mesh_shape, placements = layout
    store, receipts = MemoryStore(), []
    for rank in range(math.prod(mesh_shape)):
        with fake_rank(rank, mesh_shape) as mesh:
            sharded = distribute_tensor(tensors["w"], mesh, placements, src_data_rank=None)
            parts = {"model": Part(Values(**{**tensors, "w": sharded}))}
            world = World(rank, math.prod(mesh_shape))
            staged = stage(capture(7, parts, rank), world, StagingBuffers())
            receipts.append(write(store, CHECKPOINT, rank, staged.files, staged.parts))
    # Refuses holes and elements that two ranks wrote.
    commit(store, gather_receipts(empty_manifest(CHECKPOINT), receipts))
    return store


def test_an_empty_sharded_tensor_is_there_again():
    full = torch.empty(0, 3)
    store = save_on(((2,), [Shard(0)]), {"w": full})
    alone = {"model": Part(Values())}
    proved = read(store, CHECKPOINT)
    load(proved.manifest, proved.files, alone, 0)
    assert torch.equal(alone["model"].stateful.state["w"], full)


def test_replicas_split_a_large_shard_between_them():
    full = torch.arange(4096 * 65, dtype=torch.float64).reshape(4096, 65)
    store = save_on(((2, 2), [Replicate(), Shard(1)]), {"w": full})
    proved = read(store, CHECKPOINT)
    (entry,) = proved.manifest.tensors
    assert (
        sorted(one.region.lengths for one in entry.regions) == [(2048, 32)] * 2 + [(2048, 33)] * 2
    )
    alone = {"model": Part(Values())}
    load(proved.manifest, proved.files, alone, 0)
    assert torch.equal(alone["model"].stateful.state["w"], full)


def test_each_rank_reads_only_the_chunks_that_hold_its_rows():
    rows = 16 * CHUNK_BYTES // 4 // 1024
    full = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    store = save_on(((2,), [Shard(0)]), {"w": full})
    for rank in range(4):
        with fake_rank(rank, (4,)) as mesh:
            zeros = distribute_tensor(torch.zeros_like(full), mesh, [Shard(0)], src_data_rank=None)
            parts = {"model": Part(Values(w=zeros))}
            landing = LoadPlan(parts)
            proved = read(store, CHECKPOINT, {"model"}, landing.boxes)
            read_bytes = sum(len(one) for name, one in proved.files.items() if name != "state.json")
            # A quarter is four chunks; the header moves it across one more edge.
            assert read_bytes <= 5 * CHUNK_BYTES
            assert len(proved.files) == 2
            load(proved.manifest, proved.files, parts, rank, landing)
            first = rank * rows // 4
            assert torch.equal(zeros.to_local(), full[first : first + rows // 4])


def test_a_span_ends_where_a_hole_is_large():
    column = Region((0, 0), (4, 2))
    assert len(list(spans(whole((4, 10)), column, 9))) == 1
    assert len(list(spans(whole((4, 10)), column, 8))) == 4


@settings(deadline=None)
@given(SHAPES, st.integers(1, 60), st.data())
def test_spans_hold_a_box_once_and_skip_large_holes(shape, hole, data):
    if 0 in shape:
        return
    offsets = tuple(data.draw(st.integers(0, extent - 1)) for extent in shape)
    lengths = tuple(
        data.draw(st.integers(1, extent - offset))
        for extent, offset in zip(shape, offsets, strict=True)
    )
    box = Region(offsets, lengths)
    flat = torch.arange(math.prod(shape)).reshape(shape)
    cut = spans(whole(shape), box, hole)
    wanted = flat[tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))].flatten()
    got = []
    for part, first, count in cut:
        inside = flat[
            tuple(slice(a, a + n) for a, n in zip(part.offsets, part.lengths, strict=True))
        ].flatten()
        assert intersect(part, box) == part
        assert (first, first + count - 1) == (int(inside[0]), int(inside[-1]))
        steps = inside[1:] - inside[:-1]
        assert not len(steps) or int(steps.max()) - 1 < hole
        got += inside.tolist()
    assert got == wanted.tolist()
