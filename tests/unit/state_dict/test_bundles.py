"""A large share becomes several files, cut between its regions; a small one stays one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save.persist import write
from resilient.distributed.launch_env import World
from resilient.format.keys import CheckpointId, is_file_name, shard_name
from resilient.format.regions import whole
from resilient.state_dict import save_planner
from resilient.state_dict.resharding import load
from resilient.state_dict.save_planner import (
    FILE_BYTES_MAX,
    FILE_BYTES_MIN,
    FILES_MIN,
    TensorSpec,
    WriteItem,
    split_into_files,
)
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, empty_manifest

MIB = 1 << 20


def piece(name, *shape):
    """A piece of any size that takes no memory."""
    data = torch.zeros(()).expand(shape)
    return WriteItem(TensorSpec(name, "F32", shape), whole(shape), data)


def rows(name, mib):
    """A piece of so many MiB, in rows of one MiB."""
    return piece(name, mib, MIB // 4)


def sizes(files):
    return [sum(one.size_bytes for one in file) / MIB for file in files]


def test_a_small_share_is_one_file():
    share = [rows(str(number), 5) for number in range(6)]
    assert split_into_files(share) == [share]
    assert split_into_files([]) == []


def test_a_large_share_is_cut_in_files_of_equal_bytes_between_its_regions():
    share = [rows(str(number), 4) for number in range(40)]
    files = split_into_files(share)
    assert sizes(files) == [40] * FILES_MIN
    assert [one for file in files for one in file] == share, "in order, and none of them cut"


def test_a_very_large_share_is_cut_in_more_files():
    files = split_into_files([rows(str(number), 64) for number in range(64)])
    assert sizes(files) == [256] * 16


def test_what_follows_a_large_region_is_shared_out_anew():
    files = split_into_files([rows("wte", 154), *(rows(f"h.{number}", 29) for number in range(12))])
    assert sizes(files) == [154, 116, 116, 116]


def test_a_region_larger_than_any_file_is_cut_between_its_rows():
    files = split_into_files([rows("wte", 700)])
    regions = [one.region for file in files for one in file]
    assert len(files) == 3
    assert max(sizes(files)) <= FILE_BYTES_MAX / MIB
    assert [one.offsets[0] for one in regions] == [0, *(regions[0].lengths[0], 467)]
    assert sum(one.lengths[0] for one in regions) == 700


def test_one_row_is_never_cut():
    assert sizes(split_into_files([piece("flat", 1, 100 * MIB)])) == [400]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 400), max_size=60))
def test_every_region_is_in_one_file_and_no_file_is_larger_than_it_must_be(mibs):
    share = [rows(str(number), mib) for number, mib in enumerate(mibs)]
    files = split_into_files(share)
    assert all(files)
    held = [(one.spec.name, row) for file in files for one in file for row in _rows(one)]
    assert held == [(one.spec.name, row) for one in share for row in _rows(one)]
    largest = max((one.size_bytes for file in files for one in file), default=0) / MIB
    mean = max(sum(mibs) / FILES_MIN, FILE_BYTES_MIN / MIB)
    assert max(sizes(files), default=0) <= max(FILE_BYTES_MAX / MIB, mean) + largest


def _rows(one):
    first = one.region.offsets[0]
    return range(first, first + one.region.lengths[0])


def test_names_of_several_files_are_names_of_files():
    assert shard_name("model", 3) == "model.r00003.safetensors"
    assert shard_name("model", 3, 1) == "model.r00003-01.safetensors"
    assert is_file_name(shard_name("model", 99999, 12345))


def saved(store, part):
    staged = stage(capture(1, {"model": Part(part)}, 0), World(), StagingBuffers())
    checkpoint = CheckpointId(1, 1)
    receipt = write(store, checkpoint, 0, staged.files, staged.parts)
    commit(store, gather_receipts(empty_manifest(checkpoint), [receipt]))
    return checkpoint


@pytest.mark.parametrize("max_mib", [1, 2])
def test_a_state_in_several_files_loads_to_the_bit(monkeypatch, max_mib):
    monkeypatch.setattr(save_planner, "FILE_BYTES_MAX", max_mib * MIB)
    monkeypatch.setattr(save_planner, "FILE_BYTES_MIN", MIB // 4)
    shapes = {"a": (700, 1024), "b": (3,), "c": (), "d": (0, 4), "e": (257, 1000), "f": (900, 300)}
    torch.manual_seed(0)
    before = {name: torch.randn(shape) for name, shape in shapes.items()}
    store = MemoryStore()
    checkpoint = saved(store, Values(**before))
    assert checkpoint.key("model.r00000-03.safetensors") in store.objects
    after = {"model": Part(Values(**{name: torch.zeros(one) for name, one in shapes.items()}))}
    proved = read(store, checkpoint)
    load(proved.manifest, proved.files, after, 0)
    for name, one in before.items():
        assert torch.equal(after["model"].stateful.state_dict()[name], one), name
