"""What files hold that mends them: checksums, headers, descriptors, and what it is written with."""

from __future__ import annotations

import json
import pickle
import random
import struct
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.layout_repair.case import VirtualFolder, sliced
from resilient.layout_repair.plan import plan_layout_repair
from resilient.layout_repair.zip_repair import (
    BYTES_MAX,
    dump,
    flip_bit_back,
    repaired_zip,
    torch_file,
)
from resilient.layouts.model import Unreadable
from resilient.layouts.pickle_reader import PickledGlobal, read_pickle
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import write_titan

STATE = {"w": torch.arange(300.0), "v": torch.ones(7), "step": 3, "name": "x" * 40}


@pytest.fixture
def saved(tmp_path):
    torch.save(STATE, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def draft_of(path):
    folder = open_folder(str(path))
    return VirtualFolder(folder, folder.list())


def mended(path):
    draft = draft_of(path)
    pieces = repaired_zip(draft, path.name, 0, path.stat().st_size)
    if pieces is None:
        return None
    draft.put(path.name, *pieces)
    return b"".join(draft.blocks(path.name))


def test_each_flipped_bit_is_found_by_the_checksum_alone():
    data = random.Random(1).randbytes(60)
    for place in range(60 * 8):
        spoiled = bytearray(data)
        spoiled[place // 8] ^= 1 << place % 8
        assert flip_bit_back(bytes(spoiled), zlib.crc32(data)) == data


def test_two_flipped_bits_are_not_taken_for_one_and_much_content_is_left_alone():
    data = bytes(40)
    assert flip_bit_back(b"\3" + data[1:], zlib.crc32(data)) is None
    long = bytes(BYTES_MAX + 1)
    assert flip_bit_back(b"\1" + long[1:], zlib.crc32(long)) is None


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_directory_is_written_anew_to_the_byte(saved, cut):
    whole = saved.read_bytes()
    saved.write_bytes(whole[:-cut])
    assert mended(saved) == whole


def test_bytes_behind_the_end_are_cut_off(saved):
    whole = saved.read_bytes()
    saved.write_bytes(whole + b"\0" * 30)
    assert mended(saved) == whole


def test_a_flipped_bit_in_a_tensor_and_in_the_pickle_come_back(saved):
    whole = saved.read_bytes()
    spoiled = bytearray(whole)
    spoiled[whole.find(struct.pack("<f", 77.0))] ^= 4
    spoiled[whole.find(b"x" * 40) + 3] ^= 64
    saved.write_bytes(bytes(spoiled))
    assert mended(saved) == whole


def test_a_zip_that_lost_a_member_is_not_called_whole(saved):
    saved.write_bytes(saved.read_bytes()[:1500])
    assert mended(saved) is None
    plan = plan_layout_repair(str(saved))
    assert not plan.is_repaired
    saved.write_bytes(b"")
    assert mended(saved) is None


def test_plain_values_are_a_file_that_torch_loads(tmp_path):
    value = {"a": 1, "b": [0.5, None, True], "c": (2**40, "text"), "d": {3: -1}}
    (tmp_path / "s.pt").write_bytes(torch_file(value, "s"))
    assert torch.load(tmp_path / "s.pt", weights_only=True) == value
    for strange in (b"bytes", PickledGlobal("os", "system"), object()):
        with pytest.raises(Unreadable):
            torch_file({"a": strange}, "s")


def test_an_index_of_slices_is_written_as_what_it_was(tmp_path):
    data = (write_titan(tmp_path) / ".metadata").read_bytes()
    assert pickle.loads(dump(read_pickle(data).value)) == pickle.loads(data)  # noqa: S301 - ours


def test_headers_of_safetensors_lose_doubles_and_what_is_behind(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3), "v": torch.zeros(2)}, path)
    whole = path.read_bytes()
    (length,) = struct.unpack_from("<Q", whole)
    head = json.loads(whole[8 : 8 + length])
    entry = json.dumps({"w": head["w"]})[1:-1]
    other = json.dumps({"w": {**head["w"], "dtype": "I32"}})[1:-1]
    for extra, is_repaired in ((entry, True), (other, False)):
        text = f"{whole[8 : 8 + length].decode().rstrip()[:-1]},{extra}}}".encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        assert plan_layout_repair(str(path)).is_repaired == is_repaired, extra
    path.write_bytes(whole + b"tail")
    plan = plan_layout_repair(str(path))
    path.write_bytes(b"".join(plan.draft.blocks(path.name)))
    assert path.read_bytes() == whole
    assert load_file(path)


def test_a_draft_reads_across_its_pieces(saved):
    draft, whole = draft_of(saved), saved.read_bytes()
    draft.put("x", *sliced(draft.pieces("last.pt"), 10, 20), b"new", whole[:5])
    expected = whole[10:20] + b"new" + whole[:5]
    for start in range(len(expected)):
        for length in (1, 4, 50):
            assert draft.read("x", start, length) == expected[start : start + length]
