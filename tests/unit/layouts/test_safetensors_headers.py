"""The reader of safetensors headers refuses what the safetensors library refuses."""

from __future__ import annotations

import json
import struct

import pytest
from safetensors import SafetensorError, safe_open

from resilient.layouts.json_files import read_header
from resilient.layouts.model import Unreadable
from resilient.storage.folder import open_folder

DTYPES = (
    *("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64"),
    *("U64", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3"),
    *("F6_E3M2", "C128", "C32", "F128", "f32", "float32", ""),
)
BITS = {"BOOL": 8, "BF16": 16, "float32": 32, "": 32, "f32": 32}


def entry(dtype, shape, begin, end, **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


PAIR = entry("F32", [2], 0, 8)


def of_dtype(dtype):
    bits = BITS.get(dtype) or int(dtype.partition("_")[0].lstrip("BCFIU"))
    return {"a": entry(dtype, [4], 0, bits // 2)}, bits // 2


HEADERS = {
    "whole": ({"a": PAIR}, 8),
    "overlap": ({"a": PAIR, "b": entry("F32", [2], 4, 12)}, 12),
    "hole": ({"a": PAIR, "b": entry("F32", [2], 12, 20)}, 20),
    "bytes behind the end": ({"a": PAIR}, 9),
    "odd offset": ({"a": entry("U8", [1], 0, 1), "b": entry("F32", [1], 1, 5)}, 5),
    "metadata with a number": ({"__metadata__": {"a": 1}, "a": PAIR}, 8),
    "metadata that is a list": ({"__metadata__": [], "a": PAIR}, 8),
    "metadata that is null": ({"__metadata__": None, "a": PAIR}, 8),
    "decimal offsets": ({"a": entry("F32", [2], 0.0, 8.0)}, 8),
    "decimal shape": ({"a": entry("F32", [2.0], 0, 8)}, 8),
    "shape of truth values": ({"a": entry("F32", [True], 0, 4)}, 4),
    "negative shape": ({"a": entry("F32", [-2], 0, 8)}, 8),
    "three offsets": ({"a": {**PAIR, "data_offsets": [0, 8, 8]}}, 8),
    "half a byte": ({"a": entry("F4", [3], 0, 2)}, 2),
    "six bits": ({"a": entry("F6_E2M3", [5], 0, 4)}, 4),
    "fewer bytes than the shape": ({"a": entry("F32", [3], 0, 8)}, 8),
    "overflow": ({"a": entry("F32", [1 << 40, 1 << 40], 0, 8)}, 8),
    "another key": ({"a": {**PAIR, "note": 1}}, 8),
    "no dtype": ({"a": entry(None, [2], 0, 8)}, 8),
    "non-ASCII name": ({"\u00e4\u6f22": PAIR}, 8),
    "half of a surrogate pair": (b'{"\\ud800":' + json.dumps(PAIR).encode() + b"}", 8),
    "bytes that are no UTF-8": (b'{"\xff":' + json.dumps(PAIR).encode() + b"}", 8),
    "control character": (b'{"a\x01":' + json.dumps(PAIR).encode() + b"}", 8),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps({"a": PAIR}).encode(), 8),
    "NUL behind it": (json.dumps({"a": PAIR}).encode() + b"\0", 8),
    "a field twice": (b'{"a":{"dtype":"F32",' + json.dumps(PAIR).encode()[1:] + b"}", 8),
    "empty": ({}, 0),
    **{f"dtype {one}": of_dtype(one) for one in DTYPES},
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_refused_by_safetensors_is_refused(tmp_path, case):
    header, size_bytes = HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size_bytes))
    try:
        with safe_open(path, "np"):
            is_taken = True
    except SafetensorError:
        is_taken = False
    folder = open_folder(str(path))
    if is_taken:
        read_header(folder, folder.list(), path.name)
    else:
        with pytest.raises(Unreadable):
            read_header(folder, folder.list(), path.name)


def test_header_length_beyond_the_file_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    folder = open_folder(str(path))
    with pytest.raises(Unreadable, match="claims"):
        read_header(folder, folder.list(), path.name)
