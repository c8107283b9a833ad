"""Values written as torch and pickle would write them, without either: what is read can be put.

The other half of :mod:`resilient.layouts.pickles`. What a pickle was found to call is written as
the same call, and nothing else can be: no name comes from here.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

from resilient.layouts.pickled import Made, Name
from resilient.layouts.values import Unreadable
from resilient.mending.zips import Member, descriptor, directory, header

_DEPTH_MAX = 64
_INT_32 = 1 << 31
_ALIGNMENT = 64
# torch makes these without their `__init__`, and fills them from a state.
_WITHOUT_INIT = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "_StorageInfo"),
}


def dump(value: Any) -> bytes:
    """Return a pickle (protocol 4) of plain values, and of what a pickle was found to call.

    Raises:
        Unreadable: it holds something else, or is deeper than any checkpoint.
    """
    return b"\x80\x04" + _put(value, 0) + b"."


def torch_file(value: Any, root: str) -> bytes:
    """Return a file of torch's that holds plain values and no tensor.

    Args:
        value: what is in it.
        root: the name of the folder in it; torch takes the file's own without its ending.

    Raises:
        Unreadable: there is more than plain values in it.
    """
    content = {
        "data.pkl": b"\x80\x02" + _put(value, 0, is_old=True) + b".",
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": b"little",
        "version": b"3\n",
    }
    made, members = b"", []
    for key, data in content.items():
        name, at = f"{root}/{key}", len(made)
        bare = at + 30 + len(name) + 4
        head = header(name, 4 + -bare % _ALIGNMENT)
        checksum, start = zlib.crc32(data), at + len(head)
        made += head + data + descriptor(checksum, len(data))
        members.append(Member(name, at, start, len(data), checksum, len(made), is_whole=True))
    return made + directory(members, len(made))


def _put(value: Any, depth: int, *, is_old: bool = False) -> bytes:
    if depth > _DEPTH_MAX:
        raise Unreadable(f"values in values, more than {_DEPTH_MAX} deep")
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int | float | str | bytes):
        return _scalar(value, is_old=is_old)
    inner = depth + 1
    if isinstance(value, dict):
        flat = [part for pair in value.items() for part in pair]
        return b"}(" + b"".join(_put(one, inner, is_old=is_old) for one in flat) + b"u"
    if isinstance(value, list | tuple):
        held = b"".join(_put(one, inner, is_old=is_old) for one in value)
        return b"](" + held + b"e" if isinstance(value, list) else b"(" + held + b"t"
    if is_old or not isinstance(value, Made | Name):
        raise Unreadable(f"a {type(value).__name__}, which is no plain value")
    return _name(value) if isinstance(value, Name) else _made(value, inner)


def _scalar(value: float | str | bytes, *, is_old: bool) -> bytes:
    if isinstance(value, int):
        if -_INT_32 <= value < _INT_32:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, bytes):
        if is_old:
            raise Unreadable("bytes, which its format has no room for")
        return b"B" + struct.pack("<I", len(value)) + value
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _name(name: Name) -> bytes:
    if "\n" in name.dotted:
        raise Unreadable("a name with the end of a line in it")
    return f"c{name.module}\n{name.name}\n".encode()


def _made(made: Made, depth: int) -> bytes:
    if not isinstance(made.name, Name) or not isinstance(made.args, tuple):
        raise Unreadable("a call of what is no name")
    call = b"\x81" if made.name.name in _WITHOUT_INIT else b"R"
    found = _name(made.name) + _put(made.args, depth) + call
    if made.items:
        raise Unreadable("a call that is given items")
    return found if made.state is None else found + _put(made.state, depth) + b"b"
