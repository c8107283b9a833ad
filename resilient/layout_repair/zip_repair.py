"""Repair of torch zip files with a flipped bit or a lost directory, and a writer of such files.

If only one bit of a zip member is flipped, the CRC-32 of the member identifies the position of this
bit. In a member with n bits of content, other damage looks like a single flipped bit with a
probability of n/2^32. The repair therefore corrects only members of at most ``BYTES_MAX`` bytes,
and the corrected file must be valid.

torch writes a member's header, its content, and then a descriptor with checksum and length. The
directory at the end of the zip repeats these values of all members. The repair can therefore
rewrite a lost directory, and find the intact members of a truncated zip.

The writer produces the same format as torch and pickle, but imports neither. A pickle names the
functions that its reader must call. The writer uses only names that
:mod:`resilient.layouts.pickle_reader` found in another pickle of the checkpoint.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.layout_repair.case import BLOCK_BYTES, sliced
from resilient.layouts.model import Unreadable
from resilient.layouts.pickle_reader import PickledCall, PickledGlobal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.layout_repair.case import Piece, VirtualFolder

BYTES_MAX = 1 << 18
"""Largest content to repair. A wrong repair would be accepted once in 2,000 cases."""


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = register >> 1 ^ (0xEDB88320 if register & 1 else 0)
        table.append(register)
    return tuple(table)


_FORWARD = _table()
_BACKWARD = {word >> 24: byte for byte, word in enumerate(_FORWARD)}
_OF_LAST = {_FORWARD[1 << bit]: bit for bit in range(8)}


def flip_bit_back(data: bytes, checksum: int) -> bytes | None:
    """Return the bytes with one flipped bit corrected; None if this does not fit the checksum.

    Args:
        data: The damaged bytes.
        checksum: CRC-32 of the original bytes.
    """
    if len(data) > BYTES_MAX:
        return None
    trace = zlib.crc32(data) ^ checksum
    for bytes_from_end in range(len(data)):
        bit = _OF_LAST.get(trace)
        if bit is not None:
            copy = bytearray(data)
            copy[-1 - bytes_from_end] ^= 1 << bit
            return bytes(copy)
        byte = _BACKWARD[trace >> 24]
        trace = (trace ^ _FORWARD[byte]) << 8 & 0xFFFFFFFF | byte
    return None


_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL, _DIRECTORY, _DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
_STREAMED, _FLAGS = 8, 0x0808
_BIG = 0xFFFFFFFF
_LAST = ".data/serialization_id"
_MEMBERS_MAX = 1 << 20
_NAME_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Member:
    """One member of a zip; offsets are relative to the start of the zip.

    Attributes:
        name: Name with the root folder.
        header: Offset of its header.
        data: Offset of its content.
        size_bytes: Size of its content.
        checksum: Recorded checksum of its content.
        end: Offset after its descriptor.
        is_whole: Whether its content has this checksum.
    """

    name: str
    header: int
    data: int
    size_bytes: int
    checksum: int
    end: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Scan:
    """Members of a zip according to their local headers.

    Attributes:
        members: Members in file order, up to the first unreadable header.
        has_all: Whether the directory, or the member that torch writes last, was reached.
    """

    members: tuple[Member, ...]
    has_all: bool

    @property
    def end(self) -> int:
        """Offset of the directory."""
        return self.members[-1].end if self.members else 0


def scan_members(draft: VirtualFolder, name: str, start: int, size_bytes: int) -> Scan:
    """Read the members of a zip by their local headers, including all content.

    Args:
        draft: Folder of the file.
        name: Name of the file.
        start: Offset of the zip.
        size_bytes: Largest length of the zip.

    Raises:
        StoreError: The file could not be read.
    """
    members: list[Member] = []
    at, stop = start, start + size_bytes
    while len(members) < _MEMBERS_MAX:
        member = _member_at(draft, name, at, stop, start)
        if member is None:
            break
        members.append(member)
        at = start + member.end
    next_signature = draft.read(name, at, len(_DIRECTORY)) if at < stop else b""
    is_last = bool(members) and members[-1].name.endswith(_LAST)
    return Scan(tuple(members), bool(members) and (next_signature == _DIRECTORY or is_last))


def repaired_zip(
    draft: VirtualFolder, name: str, start: int, size_bytes: int
) -> tuple[Piece, ...] | None:
    """Return a zip with intact members and a new directory; None if impossible.

    Args:
        draft: Folder of the file.
        name: Name of the file.
        start: Offset of the zip.
        size_bytes: Largest length of the zip.

    Raises:
        StoreError: The file could not be read.
    """
    scan = scan_members(draft, name, start, size_bytes)
    if not scan.has_all:
        return None
    pieces = draft.pieces(name)
    new_pieces: list[Piece] = []
    at = 0
    for member in scan.members:
        if member.is_whole:
            continue
        if member.size_bytes > BYTES_MAX:
            return None
        data = draft.read(name, start + member.data, member.size_bytes)
        repaired_data = flip_bit_back(data, member.checksum)
        if repaired_data is None:
            return None
        new_pieces += [*sliced(pieces, start + at, start + member.data), repaired_data]
        at = member.data + member.size_bytes
    new_pieces += sliced(pieces, start + at, start + scan.end)
    return (*new_pieces, directory(scan.members, scan.end))


def directory(members: Sequence[Member], at: int) -> bytes:
    """Return the directory of a zip, with exactly the bytes that torch writes.

    Args:
        members: Members of the zip.
        at: Offset of the directory.
    """
    entries = b"".join(_entry(member) for member in members)
    count = len(members)
    end = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 798, 45, 0, 0, count, count, len(entries), at
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at + len(entries), 1)
    short_count, directory_offset = min(count, 0xFFFF), min(at, _BIG)
    last = struct.pack(
        "<4s4H2IH",
        b"PK\x05\x06",
        0,
        0,
        short_count,
        short_count,
        min(len(entries), _BIG),
        directory_offset,
        0,
    )
    return entries + end + locator + last


def header(name: str, padding: int = 0) -> bytes:
    """Return the header of a member, with padding after its name."""
    encoded = name.encode()
    extra = struct.pack("<2sH", b"FB", padding - 4) + b"Z" * (padding - 4) if padding else b""
    head = _HEADER.pack(_LOCAL, 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(encoded), len(extra))
    return head + encoded + extra


def descriptor(checksum: int, size_bytes: int) -> bytes:
    """Return the descriptor that follows a member's content."""
    form = "<4sI2I" if size_bytes < _BIG else "<4sI2Q"
    return struct.pack(form, _DESCRIPTOR, checksum, size_bytes, size_bytes)


def _entry(member: Member) -> bytes:
    name = member.name.encode()
    large_values = [
        value for value in (member.size_bytes, member.size_bytes, member.header) if value >= _BIG
    ]
    extra = (
        struct.pack(f"<2H{len(large_values)}Q", 1, 8 * len(large_values), *large_values)
        if large_values
        else b""
    )
    size_bytes, place = min(member.size_bytes, _BIG), min(member.header, _BIG)
    sizes = (member.checksum, size_bytes, size_bytes, len(name), len(extra))
    packed = _ENTRY.pack(_DIRECTORY, 0, 0, _FLAGS, 0, 0, 0, *sizes, 0, 0, 0, 0, place)
    return packed + name + extra


def _member_at(draft: VirtualFolder, name: str, at: int, stop: int, start: int) -> Member | None:
    head = draft.read(name, at, _HEADER.size)
    if len(head) != _HEADER.size or not head.startswith(_LOCAL) or at + len(head) > stop:
        return None
    _, _, flags, method, _, _, checksum, packed, size_bytes, name_bytes, extra = _HEADER.unpack(
        head
    )
    data = at + _HEADER.size + name_bytes + extra
    if method or name_bytes > _NAME_BYTES_MAX or data > stop:
        return None
    name_there = draft.read(name, at + _HEADER.size, name_bytes).decode("utf-8", "replace")
    if flags & _STREAMED:
        member = _described(draft, name, data, stop)
        if member is None:
            return None
        size_bytes, checksum, end = member
    else:
        end = data + size_bytes
    if end > stop or (packed != size_bytes and not flags & _STREAMED):
        return None
    is_whole = _sum(draft, name, data, size_bytes) == checksum
    places = (at - start, data - start, size_bytes, checksum, end - start)
    return Member(name_there, *places, is_whole)


def _described(
    draft: VirtualFolder, name: str, data: int, stop: int
) -> tuple[int, int, int] | None:
    """Return length, checksum and end of the first descriptor that fits its position."""
    for at in _places(draft, name, data, stop):
        header_bytes = draft.read(name, at + 4, 20)
        for form in ("<3I", "<I2Q"):
            length = struct.calcsize(form)
            if len(header_bytes) < length or at + 4 + length > stop:
                continue
            checksum, packed, size_bytes = struct.unpack(form, header_bytes[:length])
            if packed == size_bytes == at - data:
                return size_bytes, checksum, at + 4 + length
    return None


def _places(draft: VirtualFolder, name: str, data: int, stop: int) -> Iterator[int]:
    """Yield the offsets at which a descriptor may begin."""
    at = data
    while at < stop:
        block = draft.read(name, at, min(BLOCK_BYTES, stop - at))
        if len(block) < len(_DESCRIPTOR):
            return
        place = block.find(_DESCRIPTOR)
        while place >= 0:
            yield at + place
            place = block.find(_DESCRIPTOR, place + 1)
        at += len(block) - len(_DESCRIPTOR) + 1


def _sum(draft: VirtualFolder, name: str, at: int, size_bytes: int) -> int:
    checksum = 0
    for begin in range(0, size_bytes, BLOCK_BYTES):
        length = min(BLOCK_BYTES, size_bytes - begin)
        checksum = zlib.crc32(draft.read(name, at + begin, length), checksum)
    return checksum


_DEPTH_MAX = 64
_INT_32 = 1 << 31
_ALIGNMENT = 64
# A pickle creates objects of these classes without `__init__`, and then sets their state.
_WITHOUT_INIT = {
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
    *("BytesStorageMetadata", "ChunkStorageMetadata", "_StorageInfo"),
}


def dump(value: Any) -> bytes:
    """Return a pickle (protocol 4) of plain values and of calls from another pickle.

    Raises:
        Unreadable: The value contains other objects, or is deeper than any checkpoint.
    """
    return b"\x80\x04" + _encode_value(value, 0) + b"."


def torch_file(value: Any, root: str) -> bytes:
    """Return a torch file of plain values without tensors.

    Args:
        value: Value to store.
        root: Name of the folder in the zip; torch uses the file name without its extension.

    Raises:
        Unreadable: The value contains more than plain values.
    """
    content = {
        "data.pkl": b"\x80\x02" + _encode_value(value, 0, is_old=True) + b".",
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNMENT).encode(),
        "byteorder": b"little",
        "version": b"3\n",
    }
    zip_bytes, members = b"", []
    for key, data in content.items():
        name, at = f"{root}/{key}", len(zip_bytes)
        bare = at + 30 + len(name) + 4
        head = header(name, 4 + -bare % _ALIGNMENT)
        checksum, start = zlib.crc32(data), at + len(head)
        zip_bytes += head + data + descriptor(checksum, len(data))
        members.append(Member(name, at, start, len(data), checksum, len(zip_bytes), is_whole=True))
    return zip_bytes + directory(members, len(zip_bytes))


def _encode_value(value: Any, depth: int, *, is_old: bool = False) -> bytes:
    if depth > _DEPTH_MAX:
        raise Unreadable(f"more than {_DEPTH_MAX} levels of nested values")
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int | float | str | bytes):
        return _scalar(value, is_old=is_old)
    inner = depth + 1
    if isinstance(value, dict):
        flat = [part for pair in value.items() for part in pair]
        return b"}(" + b"".join(_encode_value(item, inner, is_old=is_old) for item in flat) + b"u"
    if isinstance(value, list | tuple):
        packed = b"".join(_encode_value(item, inner, is_old=is_old) for item in value)
        return b"](" + packed + b"e" if isinstance(value, list) else b"(" + packed + b"t"
    if is_old or not isinstance(value, PickledCall | PickledGlobal):
        raise Unreadable(f"a {type(value).__name__}, which is not a plain value")
    return _name(value) if isinstance(value, PickledGlobal) else _encode_call(value, inner)


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
            raise Unreadable("bytes, which its format cannot hold")
        return b"B" + struct.pack("<I", len(value)) + value
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def _name(name: PickledGlobal) -> bytes:
    if "\n" in name.dotted:
        raise Unreadable("a name with the end of a line in it")
    return f"c{name.module}\n{name.name}\n".encode()


def _encode_call(pickled_call: PickledCall, depth: int) -> bytes:
    if not isinstance(pickled_call.name, PickledGlobal) or not isinstance(pickled_call.args, tuple):
        raise Unreadable("a call of an invalid name")
    call = b"\x81" if pickled_call.name.name in _WITHOUT_INIT else b"R"
    code = _name(pickled_call.name) + _encode_value(pickled_call.args, depth) + call
    if pickled_call.items:
        raise Unreadable("a call with items")
    return (
        code
        if pickled_call.state is None
        else code + _encode_value(pickled_call.state, depth) + b"b"
    )
