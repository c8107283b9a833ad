"""Damage is found wherever it is, and named."""

from __future__ import annotations

import pytest

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.verify import verify
from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, save

CHECKPOINT = CheckpointId(1, 7)


@pytest.fixture
def store():
    store = MemoryStore()
    begin(store)
    save(store, CHECKPOINT, ranks=2)
    return store


def test_an_intact_checkpoint_has_no_findings_at_any_level(store):
    for level in ("quick", "full", "deep"):
        assert verify(store, CHECKPOINT, level) == []


def test_every_byte_of_every_file_is_covered(store):
    """Flip one bit in a sample of bytes of each file, the manifest included."""
    for key in [key for key in store.objects if key.startswith(CHECKPOINT.folder)]:
        data = store.objects[key]
        for position in {*range(0, len(data), max(len(data) // 97, 1)), len(data) - 1}:
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 8)
            store.objects[key] = bytes(damaged)
            assert verify(store, CHECKPOINT, "full"), (key, position)
            with pytest.raises(IntegrityError):
                read(store, CHECKPOINT)
        store.objects[key] = data
    assert verify(store, CHECKPOINT, "deep") == []


@pytest.mark.parametrize("cut", [0, 1, 100])
def test_truncation_is_found_even_quickly(store, cut):
    for entry in read_manifest(store, CHECKPOINT).files:
        key = CHECKPOINT.key(entry.name)
        data = store.objects[key]
        store.objects[key] = data[: min(cut, len(data) - 1)]
        (finding,) = verify(store, CHECKPOINT, "quick")
        assert finding.file == entry.name
        store.objects[key] = data + b"\0"
        assert verify(store, CHECKPOINT, "quick")
        store.objects[key] = data


def test_a_missing_file_is_named_with_its_tensors(store):
    key = CHECKPOINT.key("model.r00000.safetensors")
    store.delete(key)
    (finding,) = verify(store, CHECKPOINT, "quick")
    assert (finding.file, finding.problem) == ("model.r00000.safetensors", "missing")
    assert "model/weight" in finding.tensor
    with pytest.raises(IntegrityError, match="is missing"):
        read(store, CHECKPOINT)


def test_one_flipped_bit_names_the_one_tensor(store):
    manifest = read_manifest(store, CHECKPOINT)
    bias = next(one for one in manifest.tensors if one.name == "model/bias").regions[0]
    damaged = bytearray(store.objects[CHECKPOINT.key(bias.file)])
    damaged[bias.start + 2] ^= 16
    store.objects[CHECKPOINT.key(bias.file)] = bytes(damaged)
    (finding,) = verify(store, CHECKPOINT)
    assert (finding.file, finding.tensor) == (bias.file, "model/bias")
    with pytest.raises(IntegrityError) as caught:
        read(store, CHECKPOINT)
    assert caught.value.tensor == "model/bias"


def test_a_file_of_another_checkpoint_is_damage(store):
    other = save(store, CheckpointId(1, 8), ranks=2)
    name = "model.r00000.safetensors"
    store.objects[CHECKPOINT.key(name)] = store.objects[other.key(name)]
    assert [one.file for one in verify(store, CHECKPOINT)] == [name]


def test_a_manifest_moved_to_another_folder_is_refused(store):
    moved = CheckpointId(1, 9)
    store.objects[moved.manifest_key] = store.objects[CHECKPOINT.manifest_key]
    (finding,) = verify(store, moved)
    assert "is the manifest of checkpoint-7-g1" in finding.problem


def test_what_was_never_committed_is_not_damaged(store):
    with pytest.raises(KeyNotFound):
        verify(store, CheckpointId(1, 99))


class Whole(MemoryStore):
    """A store that knows which objects were read in one piece."""

    def __init__(self, objects) -> None:
        super().__init__()
        self.objects.update(objects)
        self.got = []

    def get(self, key):
        self.got.append(key)
        return super().get(key)


def test_what_is_sound_is_proved_without_being_held_whole(store):
    files = {CHECKPOINT.key(one.name) for one in read_manifest(store, CHECKPOINT).files}
    watched = Whole(store.objects)
    assert verify(watched, CHECKPOINT, "full") == []
    assert files.isdisjoint(watched.got)
    damaged = CHECKPOINT.key("model.r00000.safetensors")
    watched.objects[damaged] = watched.objects[damaged][:-1] + b"\xff"
    (finding,) = verify(watched, CHECKPOINT, "full")
    assert finding.file == "model.r00000.safetensors"
    assert files.intersection(watched.got) == {damaged}
