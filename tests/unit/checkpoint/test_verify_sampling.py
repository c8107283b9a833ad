"""Some of the bytes, at random: what is read is what was chosen, and damage in it is named."""

from __future__ import annotations

from random import Random

import pytest

from resilient.checkpoint import verify
from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.verify import read_sample
from resilient.format.keys import CheckpointId
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import begin, frozen_parts_of, save

FIRST, SECOND = CheckpointId(1, 1), CheckpointId(1, 2)


class Counting(MemoryStore):
    """Keeps what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = []

    def get_range(self, key, start, length):
        self.ranges.append((key, start, length))
        return super().get_range(key, start, length)


@pytest.fixture
def store(monkeypatch):
    """Give two checkpoints, of which the second refers to files of the first."""
    found = Counting()
    begin(found)
    save(found, FIRST, parts=frozen_parts_of(1))
    save(found, SECOND, parts=frozen_parts_of(2), bases=[FIRST])
    return found


def manifests(store):
    return [read_manifest(store, one) for one in (SECOND, FIRST)]


def sample(store, share, seed=0, goes_on=lambda _done, _of: True):
    store.ranges.clear()
    return read_sample(store, manifests(store), share, Random(seed), goes_on)


def test_all_of_it_is_each_chunk_once(store):
    found = sample(store, 1.0)
    everything = {
        (one.key(file.name), 0): file.size_bytes
        for one in manifests(store)
        for file in one.files
        if file.size_bytes
    }
    assert found.chunks == found.of == len(everything)
    assert len(store.ranges) == len(set(store.ranges)) == found.of
    assert found.size_bytes == sum(everything.values())
    assert not any(found.findings.values())


def test_a_share_is_that_many_and_others_each_time(store):
    found = sample(store, 0.2, seed=1)
    first = set(store.ranges)
    assert found.chunks == -(-found.of // 5) == len(first)
    sample(store, 0.2, seed=2)
    assert set(store.ranges) != first
    assert sample(store, 0.0001).chunks == 1


def test_it_ends_when_it_is_told_to(store):
    told = []
    found = sample(store, 1.0, goes_on=lambda done, of: told.append((done, of)) or len(told) < 3)
    assert found.chunks == 2 < found.of
    assert told[0][0] == 0
    assert told[1][0] < told[2][0] < told[2][1]


def test_damage_in_a_shared_file_is_of_both_and_names_the_tensor(store):
    manifest = read_manifest(store, SECOND)
    shared = next(one for one in manifest.files if one.origin == FIRST)
    key = manifest.key(shared.name)
    data = bytearray(store.objects[key])
    data[-1] ^= 1
    store.objects[key] = bytes(data)
    found = sample(store, 1.0).findings
    assert [one.file for one in found[SECOND]] == [shared.name]
    assert [one.file for one in found[FIRST]] == [shared.name.partition("/")[2]]
    (finding,) = found[SECOND]
    assert (finding.severity, finding.start, finding.stop) == ("damaged", 0, shared.size_bytes)
    assert finding.problem == "content is not what was committed"
    assert finding.tensor
    assert f"verify {SECOND}" in finding.fix


def test_a_chunk_of_a_large_file_is_read_by_itself(store, monkeypatch):
    data = store.objects[FIRST.key("model.r00000.safetensors")]
    assert len(data) > 64
    monkeypatch.setattr(verify, "CHUNK_BYTES", 64)
    chunk = verify._Chunk(read_manifest(store, FIRST).files[0], 2, [])
    assert (chunk.start, chunk.size_bytes) == (128, 64)


def test_a_missing_file_is_said_to_be(store):
    store.delete(SECOND.key(next(o.name for o in manifests(store)[0].files if not o.origin)))
    assert [one.problem for one in sample(store, 1.0).findings[SECOND]] == ["missing"]


def test_a_byte_that_flips_on_the_way_is_asked_for_again(store):
    tries = []

    def wrong_once(key, start, length):
        data = MemoryStore.get_range(store, key, start, length)
        tries.append(key)
        return data if len(tries) > 1 else bytes(len(data))

    store.get_range = wrong_once
    assert not any(sample(store, 1.0).findings.values())
