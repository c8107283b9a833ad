"""Large files, read in ranges, several at once: every byte is proved before anyone sees it."""

from __future__ import annotations

import threading

import pytest
import torch

from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.read import SMALL_BYTES, read
from resilient.checkpoint.save.persist import write
from resilient.distributed.launch_env import World
from resilient.errors import IntegrityError, KeyNotFound, StoreUnavailable
from resilient.format import safetensors_file
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import CheckpointId
from resilient.format.partial_read import view_of
from resilient.state_dict.resharding import assemble, load
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.storage.local import LocalStore
from resilient.storage.transfer import MEMORY_ALIGNMENT, MultipartConfig
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, empty_manifest

CHECKPOINT = CheckpointId(1, 1)
FILE = "model.r00000.safetensors"
KEY = CHECKPOINT.key(FILE)
ROWS, COLUMNS = 3000, 1000  # 12 MB: two chunks and most of a third


def save(store):
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(ROWS, COLUMNS, generator=generator)
    parts = {"model": Part(Values(a=big, b=torch.arange(7.0), c=big[:40].clone()))}
    staged = stage(capture(1, parts, 0), World(), StagingBuffers())
    receipt = write(store, CHECKPOINT, 0, staged.files, staged.parts)
    commit(store, gather_receipts(empty_manifest(CHECKPOINT), [receipt]))
    return parts["model"].stateful.state


@pytest.fixture(scope="module")
def saved():
    store = MemoryStore()
    return store, save(store)


@pytest.fixture
def store(saved):
    copy = MemoryStore()
    copy.objects.update(saved[0].objects)
    assert len(copy.objects[KEY]) > SMALL_BYTES, "else it is read in one piece"
    return copy


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_was_saved_is_read_to_the_bit(saved, tmp_path, kind):
    there = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    for key, data in saved[0].objects.items():
        there.put(key, data)
    proved = read(there, CHECKPOINT)
    assert view_of(proved.files[FILE], 0, len(proved.files[FILE])) == there.get(KEY)
    parts = {"model": Part(Values())}
    load(proved.manifest, proved.files, parts, 0)
    for name, tensor in saved[1].items():
        assert torch.equal(parts["model"].stateful.state[name], tensor), name


def test_a_large_tensor_lies_where_it_was_read_and_as_torch_would_lay_it(store):
    proved = read(store, CHECKPOINT)
    entries = {entry.name: entry for entry in proved.manifest.tensors}
    big = assemble(entries["model/a"], proved.files)
    region = entries["model/a"].regions[0]
    assert entries["model/c"].regions[0].start % 8 == 4, "torch lays nothing there"
    for entry in entries.values():
        assert assemble(entry, proved.files).data_ptr() % MEMORY_ALIGNMENT == 0
    big[0, 0] = 42.0
    now = view_of(proved.files[FILE], region.start, 4)
    assert bytes(now) == torch.tensor([42.0]).numpy().tobytes(), "no second copy was made"
    small = assemble(entries["model/b"], proved.files)
    small.zero_()
    again = assemble(entries["model/b"], proved.files)
    assert again.tolist() == list(range(7)), "a small one keeps no file in memory"


def test_a_file_whose_tensors_begin_anywhere_is_laid_out_for_torch_as_well(monkeypatch):
    monkeypatch.setattr(safetensors_file, "_LARGE_BYTES", 1 << 40)
    older = MemoryStore()
    save(older)
    proved = read(older, CHECKPOINT)
    entry = next(one for one in proved.manifest.tensors if one.name == "model/a")
    assert entry.regions[0].start % MEMORY_ALIGNMENT, "else it proves nothing"
    tensor = assemble(entry, proved.files)
    assert tensor.data_ptr() % MEMORY_ALIGNMENT == 0
    tensor[0, 0] = 42.0
    now = view_of(proved.files[FILE], entry.regions[0].start, 4)
    assert bytes(now) == torch.tensor([42.0]).numpy().tobytes(), "no second copy was made"


class Interrupted(MemoryStore):
    """Gives some bytes that are none, in odd pieces, and then begins anew."""

    ranges = MultipartConfig()

    def fill(self, key, start, room, arrived):
        data, at = self.objects[key][start : start + len(room)], 0
        room.put(0, bytes(1000))
        arrived(0, 1000)
        for length in (700, CHUNK_BYTES - 700, CHUNK_BYTES + 1, len(data)):
            piece = data[at : at + length]
            room.put(at, piece)
            arrived(at, at + len(piece))
            at += len(piece)
            if at == len(data):
                break
        return at


def test_bytes_may_come_in_any_pieces_and_begin_anew(store):
    there = Interrupted()
    there.objects.update(store.objects)
    proved = read(there, CHECKPOINT)
    assert view_of(proved.files[FILE], 0, len(proved.files[FILE])) == store.objects[KEY]
    damaged = bytearray(store.objects[KEY])
    damaged[CHUNK_BYTES + 5] ^= 1
    there.objects[KEY] = bytes(damaged)
    with pytest.raises(IntegrityError, match=f"between bytes {CHUNK_BYTES} and {2 * CHUNK_BYTES}"):
        read(there, CHECKPOINT)


def flip(store, place):
    data = bytearray(store.objects[KEY])
    data[place] ^= 1
    store.objects[KEY] = bytes(data)


@pytest.mark.parametrize("chunk", range(3))
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_flipped_bit_in_any_chunk_is_found_and_named(store, chunk, at):
    size_bytes = len(store.objects[KEY])
    stop = min((chunk + 1) * CHUNK_BYTES, size_bytes)
    flip(store, chunk * CHUNK_BYTES if at == "first" else stop - 1)
    span = f"between bytes {chunk * CHUNK_BYTES} and {stop} of {size_bytes}; in model/a"
    with pytest.raises(IntegrityError, match=span) as caught:
        read(store, CHECKPOINT)
    assert caught.value.key == KEY


@pytest.mark.parametrize("length", [0, CHUNK_BYTES, -1])
def test_a_file_cut_short_is_damage_before_memory_is_taken(store, length):
    size_bytes = len(store.objects[KEY])
    store.objects[KEY] = store.objects[KEY][:length]
    found = len(store.objects[KEY])
    with pytest.raises(IntegrityError, match=rf"\({found} of {size_bytes} bytes\)"):
        read(store, CHECKPOINT)


def test_a_file_that_became_longer_is_damage(store):
    store.objects[KEY] += b"!"
    with pytest.raises(IntegrityError, match="not what was committed"):
        read(store, CHECKPOINT)


def test_a_missing_file_is_damage_and_a_rotated_checkpoint_is_not(store):
    del store.objects[KEY]
    with pytest.raises(IntegrityError, match="is missing"):
        read(store, CHECKPOINT)


class RotatedMeanwhile(MemoryStore):
    def get_range(self, key, start, length):
        self.objects.pop(CHECKPOINT.manifest_key, None)
        self.objects.pop(key, None)
        return super().get_range(key, start, length)


def test_a_checkpoint_that_is_rotated_away_while_it_is_read_is_gone_and_not_damaged(store):
    rotated = RotatedMeanwhile()
    rotated.objects.update(store.objects)
    with pytest.raises(KeyNotFound):
        read(rotated, CHECKPOINT)


class InRanges(MemoryStore):
    """Likes ranges of one chunk."""

    ranges = MultipartConfig(part_bytes=CHUNK_BYTES, in_flight=2)

    def fill(self, key, start, room, arrived):
        data = self.get_range(key, start, len(room))
        room.put(0, data)
        arrived(0, len(data))
        return len(data)


class OnTheWay(InRanges):
    """Ranges whose first answer is not what is stored."""

    def __init__(self, objects, spoil):
        super().__init__()
        self.objects.update(objects)
        self.spoil, self.asked = spoil, []

    def get_range(self, key, start, length):
        self.asked.append((start, length))
        data = super().get_range(key, start, length)
        return self.spoil(data) if self.asked.count((start, length)) == 1 else data


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], lambda _: b""]
)
def test_bytes_that_change_on_the_way_are_read_once_more(store, saved, spoil):
    shaky = OnTheWay(store.objects, spoil)
    proved = read(shaky, CHECKPOINT)
    tensor = next(one for one in proved.manifest.tensors if one.name == "model/a")
    assert torch.equal(assemble(tensor, proved.files), saved[1]["a"])
    assert len(shaky.asked) == 2 * len(set(shaky.asked)) == 6


class Counting(InRanges):
    def __init__(self, objects):
        super().__init__()
        self.objects.update(objects)
        self.inside, self.most, self.largest, self.counting = 0, 0, 0, threading.Lock()

    def get_range(self, key, start, length):
        with self.counting:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.largest = max(self.largest, length)
        try:
            return super().get_range(key, start, length)
        finally:
            with self.counting:
                self.inside -= 1


def test_what_is_on_the_way_is_bounded(store):
    counted = Counting(store.objects)
    read(counted, CHECKPOINT)
    assert counted.most <= counted.ranges.in_flight
    assert counted.largest == counted.ranges.part_bytes


class Asleep(MemoryStore):
    def get_range(self, key, start, length):
        raise StoreUnavailable("asleep")


def test_a_store_that_fails_says_nothing_about_a_checkpoint(store):
    asleep = Asleep()
    asleep.objects.update(store.objects)
    with pytest.raises(StoreUnavailable):
        read(asleep, CHECKPOINT)
