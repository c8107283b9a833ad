"""What cannot be saved of a sharded state, and is said at save time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from resilient.distributed.launch_env import World
from resilient.errors import IncompatibleCheckpoint, UnsavableState
from resilient.format.keys import CheckpointId
from resilient.format.manifest import Manifest, TensorEntry
from resilient.state_dict.resharding import LoadPlan
from resilient.state_dict.save_planner import write_items
from resilient.state_dict.snapshot import Part, capture
from tests.helpers.manifests import Values


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    dist.destroy_process_group()


def placed(mesh, *placements, shape=(6, 4)):
    return distribute_tensor(torch.ones(shape), mesh, placements, src_data_rank=None)


def test_a_sum_that_was_not_made_is_refused(mesh):
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(UnsavableState, match=r"`m/grad` is an unreduced sum"):
        capture(1, {"m": Part(Values(grad=partial))}, 0)


def test_a_sharded_tensor_in_a_part_of_each_rank_is_refused(mesh):
    own = {"m": Part(Values(w=placed(mesh, Replicate(), Shard(0))), "rank")}
    with pytest.raises(UnsavableState, match="`m_0/w` is sharded over ranks"):
        capture(1, own, 0)


def test_memory_that_is_not_what_the_placements_say_is_refused(mesh):
    odd = DTensor.from_local(
        torch.ones(5, 4),
        mesh,
        [Replicate(), Shard(0)],
        run_check=False,
        shape=torch.Size((6, 4)),
        stride=(4, 1),
    )
    with pytest.raises(UnsavableState, match=r"holds \(5, 4\) here"):
        write_items({"m/w": odd}, World(0, 4))


def test_a_shard_that_two_ranks_hold_is_split_between_them(mesh):
    large = placed(mesh, Replicate(), Shard(0), shape=(4096, 64))
    (piece,) = write_items({"m/w": large}, World(0, 4))
    assert piece.region.offsets == (0, 0)
    assert piece.region.lengths == (1024, 64)


def test_tied_shards_are_written_once(mesh):
    tied = placed(mesh, Replicate(), Shard(0))
    snapshot = capture(1, {"m": Part(Values(a=tied, b=tied.detach(), c=tied.clone()))}, 0)
    assert list(snapshot.parts[0].tensors) == ["m/a", "m/c"]


def test_another_shape_is_refused_before_anything_is_read(mesh):
    landing = LoadPlan({"m": Part(Values(w=placed(mesh, Replicate(), Shard(0))))})
    entry = TensorEntry("m/w", "m", "F32", (6, 5), ())
    manifest = Manifest("r", CheckpointId(1, 1), None, "", {}, (), (entry,), ())
    with pytest.raises(IncompatibleCheckpoint, match=r"shape \[6, 5\] in the checkpoint"):
        landing.boxes(manifest)
