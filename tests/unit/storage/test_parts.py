"""How objects are cut into parts, and how transfers of one store share what is on its way."""

import threading
from contextlib import suppress

import pytest

from resilient.storage.transfer import MultipartConfig, TransferLimiter, files_at_once
from resilient.testing.memory_store import MemoryStore

MIB = 1 << 20


@pytest.mark.parametrize(
    "size_bytes", [0, 1, 5 * MIB, 10 * MIB - 1, 10 * MIB, 10 * MIB + 1, 99 * MIB]
)
def test_parts_are_of_equal_size_and_none_is_a_small_rest(size_bytes):
    parts = MultipartConfig(part_bytes=5 * MIB)
    each, count = parts.bytes_for(size_bytes), parts.count_for(size_bytes)
    assert -(-size_bytes // each) <= count
    assert 5 * MIB <= each <= 10 * MIB
    rest = size_bytes - each * (count - 1)
    assert count == 1 or rest > each // 2


def test_no_upload_has_more_parts_than_s3_takes():
    parts = MultipartConfig(part_bytes=5 * MIB)
    size_bytes = 5 << 40
    assert parts.count_for(size_bytes) == 10_000
    assert parts.bytes_for(size_bytes) * 10_000 >= size_bytes


def test_transfers_of_one_store_together_have_no_more_on_their_way_than_that():
    lanes, lock = TransferLimiter(8), threading.Lock()
    now, most = 0, 0

    def transfer(wanted):
        nonlocal now, most
        for _ in range(200):
            with lanes.take(wanted) as taken:
                assert 1 <= taken <= wanted
                with lock:
                    now += taken
                    most = max(most, now)
                with lock:
                    now -= taken

    threads = [
        threading.Thread(target=transfer, args=(wanted,), daemon=True) for wanted in (1, 2, 5, 64)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert now == 0
    assert most <= 8


def test_a_large_transfer_leaves_room_for_the_next_to_begin():
    lanes = TransferLimiter(8)
    with lanes.take(64) as first, lanes.take(64) as second:
        assert (first, second) == (6, 2)
    with lanes.take(3) as one:
        assert one == 3


def test_what_failed_gives_back_what_it_took():
    lanes = TransferLimiter(1)
    for _ in range(3):
        with suppress(ValueError), lanes.take(4) as taken:
            assert taken == 1
            raise ValueError


class Sharing(MemoryStore):
    ranges = MultipartConfig(part_bytes=1000, in_flight=8, are_shared=True)

    def fill(self, key, start, room, arrived):
        raise NotImplementedError


def test_a_store_that_bounds_its_parts_by_itself_is_given_files_enough_to_fill_them():
    at_once = {size: files_at_once(Sharing(), size) for size in (0, 1000, 2100, 4000, 6000, 90_000)}
    assert at_once == {0: 8, 1000: 8, 2100: 8, 4000: 4, 6000: 2, 90_000: 2}
