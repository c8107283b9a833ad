"""What a keeper still holds is read from its memory, as long as it is what was stored."""

from __future__ import annotations

import pytest

from resilient.checkpoint.restore.memory_store import MemoryCachedStore, StagedFileRecord
from resilient.errors import IntegrityError
from resilient.format.digest import CHUNK_BYTES, digest_file
from resilient.storage.transfer import ScatterBuffer
from resilient.testing.memory_store import MemoryStore

KEY = "checkpoint-1-g1/model.r00000.safetensors"
CONTENT = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"the rest"


class Silent(MemoryStore):
    """A store that must not be asked for content."""

    def get_range(self, key, start, length):
        pytest.fail(f"{key} was asked for")


@pytest.fixture
def held(tmp_path):
    path = tmp_path / "segment"
    path.write_bytes(CONTENT + b"what the segment has besides")
    return StagedFileRecord(str(path), digest_file(CONTENT))


def proving(memory, start):
    """Return what the reader holds each chunk against, as it arrives."""

    def prove(begin, stop):
        if memory[begin:stop] != CONTENT[start + begin : start + stop]:
            raise IntegrityError("not what was stored")

    return prove


def ranges():
    return [
        (start, min(start + CHUNK_BYTES, len(CONTENT)))
        for start in range(0, len(CONTENT), CHUNK_BYTES)
    ]


def test_whole_memory_is_read_without_asking_the_store(held):
    store = MemoryCachedStore(Silent(), {KEY: held}, pytest.fail)
    for start, stop in [*ranges(), (0, len(CONTENT))]:
        memory = bytearray(stop - start)
        assert store.fill(
            KEY, start, ScatterBuffer([memoryview(memory)]), proving(memory, start)
        ) == len(memory)
        assert memory == CONTENT[start:stop]
    assert store.recalled_bytes == 2 * len(CONTENT)


@pytest.mark.parametrize("place", [0, CHUNK_BYTES, len(CONTENT) - 1])
def test_memory_that_changed_is_doubted_once_and_the_store_is_read(held, tmp_path, place):
    inner, doubted = MemoryStore(), []
    inner.put(KEY, CONTENT)
    spoiled = bytearray(CONTENT)
    spoiled[place] ^= 1
    (tmp_path / "segment").write_bytes(spoiled)
    store = MemoryCachedStore(inner, {KEY: held}, doubted.append)
    for start, stop in ranges() * 2:
        memory = bytearray(stop - start)
        assert store.fill(
            KEY, start, ScatterBuffer([memoryview(memory)]), proving(memory, start)
        ) == len(memory)
        assert memory == CONTENT[start:stop]
    assert doubted == [KEY]


def test_memory_that_is_gone_or_short_is_no_loss(held, tmp_path):
    inner, doubted = MemoryStore(), []
    inner.put(KEY, CONTENT)
    (tmp_path / "segment").write_bytes(CONTENT[:-1])
    memory = bytearray(len(CONTENT))
    store = MemoryCachedStore(inner, {KEY: held}, doubted.append)
    assert store.fill(KEY, 0, ScatterBuffer([memoryview(memory)]), proving(memory, 0)) == len(
        CONTENT
    )
    (tmp_path / "segment").unlink()
    store = MemoryCachedStore(inner, {KEY: held}, doubted.append)
    assert store.fill(KEY, 0, ScatterBuffer([memoryview(memory)]), proving(memory, 0)) == len(
        CONTENT
    )
    assert memory == CONTENT
    assert doubted == [KEY, KEY]


def test_what_is_no_whole_chunk_cannot_be_proved_and_comes_from_the_store(held):
    inner = MemoryStore()
    inner.put(KEY, CONTENT)
    memory = bytearray(10)
    store = MemoryCachedStore(inner, {KEY: held}, pytest.fail)
    assert store.fill(KEY, 5, ScatterBuffer([memoryview(memory)]), lambda *_: None) == 10
    assert memory == CONTENT[5:15]
    assert store.recalled_bytes == 0
