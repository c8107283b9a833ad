"""Files of torch and of safetensors say the same here as to the libraries that wrote them."""

from __future__ import annotations

import json
import struct
import zipfile

import pytest
import safetensors.torch
import torch

from resilient.layouts.json_files import read_header
from resilient.layouts.model import Unreadable
from resilient.layouts.torch_zip import open_archive
from resilient.storage.folder import open_folder

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip


def opened(path):
    folder = open_folder(str(path))
    return open_archive(folder, folder.list(), path.name)


@pytest.mark.parametrize("modern", [True, False], ids=["zip", "before 1.6"])
def test_every_dtype_of_torch_is_named_as_safetensors_names_it(tmp_path, modern):
    held = {name: torch.zeros(3, 2).to(dtype) for name, dtype in DTYPES.items()}
    path = tmp_path / "all.pt"
    torch.save(held, path, _use_new_zipfile_serialization=modern)
    found = {one.name: one for one in opened(path).tensors()}
    assert {name: one.dtype for name, one in found.items()} == {name: name for name in DTYPES}
    assert {one.shape for one in found.values()} == {(3, 2)}
    sizes = {name: tensor.nbytes for name, tensor in held.items()}
    assert {name: one.size_bytes for name, one in found.items()} == sizes


def test_views_parameters_subclasses_and_empty_tensors_are_tensors(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    held = {
        "view": base[1:, ::2],
        "parameter": torch.nn.Parameter(base),
        "buffer": torch.nn.Buffer(base),
        "none": torch.empty(0, 5),
        "meta": torch.empty(6, 7, device="meta"),
        "nested": [{"deep": base}],
    }
    torch.save(held, path := tmp_path / "kinds.pt")
    shapes = {one.name: one.shape for one in opened(path).tensors()}
    wanted = {"view": (2, 2), "parameter": (3, 4), "buffer": (3, 4), "none": (0, 5)}
    assert shapes == {**wanted, "meta": (6, 7), "nested.0.deep": (3, 4)}


def test_a_number_in_a_tensor_is_read_where_it_lies(tmp_path):
    line = torch.arange(10.0)
    held = {"float": line[7], "long": torch.tensor(1 << 40), "plain": 3, "many": line}
    torch.save(held, path := tmp_path / "numbers.pt")
    archive = opened(path)
    found = {name: archive.number(value) for name, value in archive.value.items()}
    assert found == {"float": 7.0, "long": 1 << 40, "plain": 3, "many": None}


def test_a_pickle_whose_checksum_is_wrong_is_not_believed(tmp_path):
    torch.save({"a": torch.zeros(2), "word": "abcdefgh"}, path := tmp_path / "spoiled.pt")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"abcdefgh", b"abcdefgx"))
    with pytest.raises(Unreadable, match="checksum"):
        opened(path)


def test_a_cut_archive_is_refused_wherever_it_is_cut(tmp_path):
    torch.save({"a": torch.zeros(40)}, path := tmp_path / "cut.pt")
    data = path.read_bytes()
    for length in range(0, len(data) - 1, 37):
        path.write_bytes(data[:length])
        with pytest.raises(Unreadable):
            opened(path)


def test_a_member_that_would_swell_is_not_unpacked(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("bomb/data.pkl", b"N" * (200 << 20) + b".")
    assert path.stat().st_size < 1 << 20
    with pytest.raises(Unreadable, match="compressed"):
        opened(path)


def test_a_zip_without_one_pickle_is_no_file_of_torch(tmp_path):
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("word/document.xml", "<xml/>")
    with pytest.raises(Unreadable, match="0 pickles"):
        opened(path)


def test_a_safetensors_header_says_what_the_library_reads(tmp_path):
    held = {name: torch.zeros(2, 5).to(dtype) for name, dtype in DTYPES.items() if name != "C64"}
    safetensors.torch.save_file(held, path := tmp_path / "model.safetensors", {"format": "pt"})
    folder = open_folder(str(path))
    tensors, meta = read_header(folder, folder.list(), path.name)
    loaded = safetensors.torch.load_file(path)
    assert {one.name: (one.shape, one.size_bytes) for one in tensors} == {
        name: (tuple(one.shape), one.nbytes) for name, one in loaded.items()
    }
    assert all(one.dtype == one.name for one in tensors)
    assert meta == {"format": "pt"}


def entry(begin, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("head", "data_bytes", "why"),
    [
        (b"\x00" * 7 + b"\x10", 100, "claims"),
        (b"\x00" * 4, 0, "4 bytes"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "overlap"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "hole"),
        ({"a": entry(0, 4)}, 8, "need 4 bytes"),
        ({"a": entry(0, 8)}, 8, "do not fit"),
        ({"a": entry(0, 4, (1 << 40, 1 << 40))}, 4, "larger than any memory"),
        ({"a": entry(0, 4, (-1, -1))}, 4, "axis"),
        ({"a": entry(0, 4, (True,))}, 4, "axis"),
        ({"a": entry(0, 4, (1,) * 100)}, 4, "shape"),
        ({"a": 5}, 4, "no tensor"),
        (b'{"a":' * 50_000, 0, "JSON"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', 4, "twice"),
        (b"[]", 0, "object"),
        (b"", 0, "empty"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, head, data_bytes, why):
    if isinstance(head, dict):
        head = json.dumps(head).encode()
    if not head.startswith(b"\x00"):
        head = struct.pack("<Q", len(head)) + head
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + bytes(data_bytes))
    folder = open_folder(str(path))
    with pytest.raises(Unreadable, match=why):
        read_header(folder, folder.list(), path.name)
