"""Ranks that read different parts of one file: what one of them finds counts for all."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.read import ReadRequest, read
from resilient.checkpoint.resume_selection import select_resume_checkpoint
from resilient.checkpoint.save.persist import write
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.launch_env import World
from resilient.errors import IntegrityError, NoIntactCheckpoint, StoreUnavailable
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.format.partial_read import view_of
from resilient.format.regions import Region
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.helpers.manifests import Values, begin, empty_manifest

ROWS, COLUMNS = 4096, 1024  # 16 MiB: four chunks and the tail that the header pushes out
FILE = "model.r00000.safetensors"


@pytest.fixture(scope="module")
def whole():
    """A store with two checkpoints of one file each."""
    store = MemoryStore()
    begin(store)
    for step in (1, 2):
        checkpoint = CheckpointId(1, step)
        parts = {"model": Part(Values(w=torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).int()))}
        staged = stage(capture(step, parts, 0), World(), StagingBuffers())
        receipt = write(store, checkpoint, 0, staged.files, staged.parts)
        commit(store, gather_receipts(empty_manifest(checkpoint), [receipt]))
    return store


@pytest.fixture
def store(whole):
    copy = MemoryStore()
    copy.objects.update(whole.objects)
    return copy


def damage(store, step, place):
    key = CheckpointId(1, step).key(FILE)
    data = bytearray(store.objects[key])
    data[place] ^= 1
    store.objects[key] = bytes(data)


def half(rank):
    """Rank 0 wants the first rows, rank 1 the last ones; never the middle."""
    first = 0 if rank == 0 else ROWS - 512
    return lambda manifest: {"model/w": (Region((first, 0), (512, COLUMNS)),)}


def resumed(store):
    def rank_main(world, board):
        comms = ControlGroup(board.another(), world, "life")
        return select_resume_checkpoint(
            store, comms, "auto", ReadRequest({"model"}, half(world.rank)), 10.0
        )

    return run_ranks(2, rank_main)


def test_nothing_damaged_gives_each_rank_its_own_bytes(store):
    first, second = (one.verified for one in resumed(store))
    assert first.manifest.checkpoint.step == 2
    assert len(first.files[FILE]) == CHUNK_BYTES
    assert 0 < len(second.files[FILE]) <= 2 * CHUNK_BYTES
    entry = second.manifest.tensors[0].regions[0]
    start = entry.start + (ROWS - 512) * COLUMNS * 4
    got = view_of(second.files[FILE], start, 512 * COLUMNS * 4)
    assert got == view_of(store.objects[CheckpointId(1, 2).key(FILE)], start, len(got))


@pytest.mark.parametrize("place", [-1, -(512 * COLUMNS * 4)])
def test_damage_in_what_one_rank_alone_reads_sends_all_back(store, place):
    damage(store, 2, place)
    choices = resumed(store)
    assert [one.checkpoint.step for one in choices] == [1, 1]
    assert "rank 1 found" in choices[0].skipped[0].reason
    assert "in model/w" in choices[0].skipped[0].reason


def test_damage_that_no_rank_reads_hurts_nobody(store):
    damage(store, 2, 6 << 20)
    assert [one.checkpoint.step for one in resumed(store)] == [2, 2]


def test_damage_everywhere_is_refused(store):
    damage(store, 1, 0)
    damage(store, 2, -1)
    with pytest.raises(NoIntactCheckpoint, match="does not start over silently"):
        resumed(store)


@pytest.mark.parametrize("length", [0, 5 << 20, -1])
def test_a_file_cut_short_or_gone_is_damage(store, length):
    key = CheckpointId(1, 2).key(FILE)
    store.objects[key] = store.objects[key][:length]
    with pytest.raises(IntegrityError, match="not what was committed"):
        read(store, CheckpointId(1, 2), {"model"}, half(1))
    del store.objects[key]
    with pytest.raises(IntegrityError, match="is missing"):
        read(store, CheckpointId(1, 2), {"model"}, half(1))


def test_every_flipped_bit_of_what_is_read_is_found(store):
    proved = read(store, CheckpointId(1, 2), {"model"}, half(1))
    extents = proved.files[FILE]
    for start, part in zip(extents.starts, extents.parts, strict=True):
        for place in (start, start + len(part) // 2, start + len(part) - 1):
            damage(store, 2, place)
            with pytest.raises(IntegrityError):
                read(store, CheckpointId(1, 2), {"model"}, half(1))
            damage(store, 2, place)
    read(store, CheckpointId(1, 2), {"model"}, half(1))


class Asleep(MemoryStore):
    def get_range(self, key, start, length):
        raise StoreUnavailable("asleep")


def test_a_store_that_fails_in_the_middle_says_nothing_about_a_checkpoint(store):
    asleep = Asleep()
    asleep.objects.update(store.objects)
    with pytest.raises(StoreUnavailable):
        resumed(asleep)


def test_bytes_that_were_not_read_are_not_given(store):
    extents = read(store, CheckpointId(1, 2), {"model"}, half(1)).files[FILE]
    with pytest.raises(LookupError):
        extents.view(0, 10)
    with pytest.raises(LookupError):
        extents.view(extents.starts[0] - 4, 8)
