"""One rank's files are put several at once, and the receipt is as if one came after the other."""

from __future__ import annotations

import threading
import time

import pytest

from resilient.checkpoint.save.persist import SMALL_BYTES, write
from resilient.errors import StoreFull, StoreUnavailable
from resilient.format.digest import digest_bytes, digest_file
from resilient.format.keys import CheckpointId
from resilient.format.manifest import StoredRegion, TensorEntry
from resilient.format.regions import whole
from resilient.format.safetensors_file import (
    StagedFile,
    StreamedFile,
    TensorSlot,
    compute_layout,
    reduce_file,
)
from resilient.storage.transfer import MultipartConfig, files_at_once, max_ranges
from resilient.testing.memory_store import MemoryStore

CHECKPOINT = CheckpointId(1, 1)
COUNT, SIZE_BYTES = 8, SMALL_BYTES // 4
FILES_AT_ONCE = max_ranges(MemoryStore()).in_flight


def files(size_bytes=SIZE_BYTES):
    return [
        a_file(f"model.r00000-{number:02d}.safetensors", number, size_bytes)
        for number in range(COUNT)
    ]


def a_file(name, number, size_bytes):
    data = bytes([number]) * size_bytes
    half = StoredRegion(whole((size_bytes // 2,)), name, 0, size_bytes // 2)
    rest = StoredRegion(whole((size_bytes // 2,)), name, size_bytes // 2, size_bytes // 2)
    tensors = tuple(
        TensorEntry(f"model/{number}{part}", "model", "U8", (size_bytes // 2,), (region,))
        for part, region in (("a", half), ("b", rest))
    )
    return StagedFile(name, data, tensors)


class Watched(MemoryStore):
    """Says who is inside a put, and lets a test hold them there."""

    def __init__(self, put=lambda _: None):
        super().__init__()
        self.hold, self.inside, self.most, self.began = put, 0, 0, []
        self.counting = threading.Lock()

    def put_new(self, key, data):
        with self.counting:
            self.began.append(key)
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            self.hold(key)
            super().put_new(key, data)
        finally:
            with self.counting:
                self.inside -= 1


class Sharing(Watched):
    """Has so many on their way at once as it is told to wait for."""

    ranges = MultipartConfig(part_bytes=SIZE_BYTES, in_flight=8, are_shared=True)

    def __init__(self, meet):
        self.meeting = threading.Barrier(meet, timeout=10)
        super().__init__(self.meet)

    def meet(self, _):
        self.meeting.wait()
        # For whoever ought not to be there.
        time.sleep(0.05)

    def fill(self, key, start, room, arrived):
        pytest.fail("nothing is read")


def test_large_files_are_put_at_once_and_the_receipt_keeps_their_order():
    meeting = threading.Barrier(FILES_AT_ONCE, timeout=10)
    store = Watched(lambda _: meeting.wait())
    mine = files()
    receipt = write(store, CHECKPOINT, 3, mine)
    assert store.most == FILES_AT_ONCE
    assert [one.name for one in receipt.files] == [one.name for one in mine]
    assert {one.rank for one in receipt.files} == {3}
    for entry, file in zip(receipt.files, mine, strict=True):
        assert entry.proof == digest_file(file.data)
        assert store.objects[CHECKPOINT.key(file.name)] == file.data
    names = [tensor.name for file in mine for tensor in file.tensors]
    assert [one.name for one in receipt.tensors] == names
    for tensor in receipt.tensors:
        (one,) = tensor.regions
        content = store.objects[CHECKPOINT.key(one.file)]
        assert one.digest == digest_bytes(content[one.start : one.start + one.size_bytes])


def test_files_that_are_made_as_they_are_written_are_fewer_at_once():
    def streamed(file):
        def fill(room):
            room[:] = file.data

        return StreamedFile(file.name, len(file.data), file.tensors, fill)

    everything, four = Sharing(8), Sharing(4)
    mine = files()
    write(everything, CHECKPOINT, 0, mine)
    write(four, CHECKPOINT, 0, [streamed(one) for one in mine])
    assert (everything.most, four.most) == (8, 4)
    assert four.objects == {CHECKPOINT.key(one.name): one.data for one in mine}


def test_of_files_that_are_copied_without_a_part_as_many_are_at_once_as_memory_has_room_for():
    slots = [TensorSlot("gone", "U8", (100,)), TensorSlot("kept", "U8", (SIZE_BYTES + (1 << 20),))]
    layout = compute_layout(slots, {})
    data = bytearray(layout.head) + bytearray(layout.size_bytes - len(layout.head))
    mine = [
        reduce_file(StagedFile(f"model.r00000-{number:02d}.safetensors", bytes(data), ()), {start})
        for start in [layout.starts["gone"]]
        for number in range(COUNT)
    ]
    two, one = Sharing(2), Sharing(1)
    write(two, CHECKPOINT, 0, mine, copies_bytes_max=3 * mine[0].size_bytes - 1)
    write(one, CHECKPOINT, 0, mine, copies_bytes_max=1)
    assert (two.most, one.most) == (2, 1)
    assert two.objects == {CHECKPOINT.key(one.name): bytes(one.data) for one in mine}


def test_a_small_save_is_put_in_one_thread():
    caller = threading.current_thread()
    store = Watched(
        lambda _: None if threading.current_thread() is caller else pytest.fail("a thread")
    )
    write(store, CHECKPOINT, 0, files(1000))
    assert store.began == [CHECKPOINT.key(one.name) for one in files(1000)]


def test_after_an_error_no_file_is_begun_and_none_is_left_on_its_way():
    slow, failed = threading.Event(), threading.Event()

    def hold(key):
        if key.endswith("-01.safetensors"):
            failed.set()
            raise StoreFull("no space", key=key)
        failed.wait(10)
        slow.wait(0.2)

    store = Watched(hold)
    with pytest.raises(StoreFull, match="no space"):
        write(store, CHECKPOINT, 0, files())
    assert store.inside == 0
    assert len(store.began) <= FILES_AT_ONCE < COUNT


class InParts(MemoryStore):
    ranges = MultipartConfig(part_bytes=1000, in_flight=8)

    def fill(self, key, start, room, arrived):
        pytest.fail("nothing is read")


def test_parts_of_all_files_together_are_as_many_as_the_store_wants():
    at_once = {size: files_at_once(InParts(), size) for size in (0, 1000, 1001, 4000, 9000)}
    assert at_once == {0: 8, 1000: 8, 1001: 4, 4000: 2, 9000: 1}


def test_of_several_errors_the_one_of_the_first_file_is_raised():
    meeting = threading.Barrier(FILES_AT_ONCE, timeout=10)

    def hold(key):
        meeting.wait()
        kind = StoreUnavailable if key.endswith("-00.safetensors") else StoreFull
        raise kind(f"of {key}", key=key)

    with pytest.raises(StoreUnavailable, match=r"-00\.safetensors"):
        write(Watched(hold), CHECKPOINT, 0, files())
