"""Memory in several pieces, as one run of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from resilient.format.digest import RunningDigest, digest_bytes
from resilient.storage.posix import PosixFileSystem
from resilient.storage.transfer import ScatterBuffer

LENGTHS = st.lists(st.integers(0, 7), max_size=6)


def room_of(lengths):
    pieces = [bytearray(length) for length in lengths]
    return pieces, ScatterBuffer(map(memoryview, pieces))


@given(LENGTHS, st.integers(0, 45), st.integers(0, 45), st.data())
def test_what_is_put_anywhere_lies_there_and_nowhere_else(lengths, one, other, data):
    pieces, room = room_of(lengths)
    begin, stop = sorted((min(one, len(room)), min(other, len(room))))
    written = data.draw(st.binary(min_size=stop - begin, max_size=stop - begin))
    room.put(begin, written)
    expected = bytes(begin) + written + bytes(len(room) - stop)
    assert b"".join(pieces) == expected
    assert b"".join(room.cut(begin, stop)) == written
    assert b"".join(room.part(begin, stop).cut(0, stop)) == written
    running = RunningDigest()
    for _ in range(2):
        running.add(room.cut(begin, stop))
        assert running.take() == digest_bytes(written)


def test_a_file_fills_more_pieces_than_one_call_takes(tmp_path):
    content = bytes(range(251)) * 20
    (tmp_path / "file").write_bytes(content)
    pieces, room = room_of([2] * 2500)
    told = []
    came = PosixFileSystem().read_into(
        tmp_path / "file", 7, room, lambda *piece: told.append(piece)
    )
    assert came == 5000
    assert b"".join(pieces) == content[7:5007]
    assert told[0][0] == 0
    assert told[-1][1] == 5000
    assert all(one[1] == two[0] for one, two in pairwise(told))
