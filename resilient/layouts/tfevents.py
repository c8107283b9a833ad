"""Reader of scalars in TensorBoard event files, which verifies the checksums of the records.

An event file is a sequence of frames. A frame has the length of its data, a checksum of this
length, the data, and a checksum of the data. Source: ``tensorflow/core/lib/io/record_writer``. A
checksum is a CRC-32C, which is then rotated and shifted by a constant. ``event.proto``,
``summary.proto`` and ``tensor.proto`` define the content of a frame. No TensorBoard or protobuf
library is needed.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.layouts.model import Unreadable
from resilient.layouts.torch_zip import RangeReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.storage.folder import DirectoryListing, Folder

FILE = re.compile(r"(?:.*/)?events\.out\.tfevents\.[^/]*")
FILE_BYTES_MAX = 64 << 20
"""Largest part of a file that is read; this part has room for a million numbers."""
_RECORD_BYTES_MAX = 16 << 10
"""Largest parsed record. A scalar needs about 40 bytes; a larger record is a text or image."""
_SCALARS_MAX = 1 << 20
_TAG_CHARACTERS_MAX = 200
_VALUES_MAX = 256
"""Largest number of scalars in one record."""
_HEAD_BYTES, _SUM_BYTES = 12, 4
_VARINT_BYTES_MAX = 10
_MASK = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_AT, _STEP, _SUMMARY = 1, 2, 5
_VALUE, _TAG, _SIMPLE, _TENSOR = 1, 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FLOAT, _DOUBLE = 1, 2
_DIGITS_MAX = 9
"""Number of decimal digits that identify every single-precision number."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One logged number.

    Attributes:
        step: Step in the writer's count.
        tag: Name of the number.
        value: The number; a single-precision number is converted to the shortest equal decimal.
    """

    step: int
    tag: str
    value: float


@dataclass(frozen=True, slots=True)
class Scalars:
    """Content of an event file.

    Attributes:
        began: Time of the first record, in seconds since 1970.
        found: Its numbers, in file order.
        broken: Description of the damage; empty for a whole file. A file that is cut at its end
            counts as whole, because a killed process leaves such a file.
    """

    began: float
    found: tuple[Scalar, ...]
    broken: str = ""


def read_scalars(folder: Folder, listing: DirectoryListing, name: str) -> Scalars:
    """Return the numbers in an event file, read record by record.

    A record with a wrong checksum is skipped and reported. Reading stops at an invalid length,
    because the start of the next record is then unknown.

    Raises:
        Unreadable: The file is missing, or no event file.
        StoreError: The file could not be read.
    """
    if name not in listing.sizes:
        raise Unreadable(listing.why_unread(name))
    size_bytes = listing.sizes[name]
    window = RangeReader(folder, name, 0, min(size_bytes, FILE_BYTES_MAX))
    all_scalars: list[Scalar] = []
    problem = (
        ""
        if size_bytes <= FILE_BYTES_MAX
        else (f"only the first of its {size_bytes} bytes are read")
    )
    began = None
    for record, record_problem in _records(window):
        problem = problem or record_problem
        if record_problem and began is None:
            raise Unreadable(f"it is not a file of events: {record_problem}")
        try:
            at, scalars = _event(record)
        except Unreadable as error:
            problem = problem or str(error)
            continue
        began = at if began is None else began
        all_scalars += scalars
        if len(all_scalars) >= _SCALARS_MAX:
            problem = problem or f"only the first of more than {_SCALARS_MAX} numbers are read"
            break
    return Scalars(began or 0.0, tuple(all_scalars), problem)


def masked_sum(data: bytes) -> int:
    """Return the checksum of a frame's part: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    rows = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)  # noqa: PLW2901 - it is shifted out
        rows.append(crc)
    return tuple(rows)


_TABLE = _table()


def _records(window: RangeReader) -> Iterator[tuple[bytes, str]]:
    """Yield each record with its damage; a record that is too large for a scalar is empty."""
    while len(head := window.read(_HEAD_BYTES)) == _HEAD_BYTES:
        length, expected = struct.unpack("<QI", head)
        if masked_sum(head[:8]) != expected:
            yield b"", "the checksum of a record's length is wrong"
            return
        if length > _RECORD_BYTES_MAX:
            if length > FILE_BYTES_MAX:
                yield b"", f"a record claims {length} bytes"
                return
            window.seek(window.tell() + length + _SUM_BYTES)
            yield b"", ""
            continue
        body = window.read(length + _SUM_BYTES)
        if len(body) != length + _SUM_BYTES:
            return
        is_right = masked_sum(body[:length]) == int.from_bytes(body[length:], "little")
        yield (body[:length], "") if is_right else (b"", "the checksum of a record is wrong")


def _event(data: bytes) -> tuple[float, list[Scalar]]:
    at, step = 0.0, 0
    summaries: list[bytes] = []
    for number, wire, value in _fields(data):
        if (number, wire) == (_AT, _EIGHT) and isinstance(value, bytes):
            (at,) = struct.unpack("<d", value)
        elif (number, wire) == (_STEP, _VARINT) and isinstance(value, int):
            step = value
        elif (number, wire) == (_SUMMARY, _BYTES) and isinstance(value, bytes):
            summaries.append(value)
    # A negative step is encoded as an unsigned 64-bit number.
    return at, [] if step >= 1 << 62 else [
        scalar for summary in summaries for scalar in _summary(step, summary)
    ]


def _summary(step: int, data: bytes) -> Iterator[Scalar]:
    for count, (number, wire, value) in enumerate(_fields(data)):
        if count >= _VALUES_MAX:
            raise Unreadable(f"a record of more than {_VALUES_MAX} numbers")
        if (number, wire) == (_VALUE, _BYTES) and isinstance(value, bytes):
            scalar = _parse_value(value)
            if scalar is not None:
                yield Scalar(step, *scalar)


def _parse_value(data: bytes) -> tuple[str, float] | None:
    tag, number = None, None
    for field, wire, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if (field, wire) == (_TAG, _BYTES):
            tag = value.decode("utf-8", "replace")
        elif (field, wire) == (_SIMPLE, _FOUR):
            number = _single(value)
        elif (field, wire) == (_TENSOR, _BYTES):
            number = _tensor_number(value)
    if number is None or not tag or len(tag) > _TAG_CHARACTERS_MAX:
        return None
    return tag, number


def _tensor_number(data: bytes) -> float | None:
    """Return the number of a one-element tensor; None for any other tensor."""
    dtype, content = 0, b""
    for field, wire, value in _fields(data):
        if (field, wire) == (_DTYPE, _VARINT) and isinstance(value, int):
            dtype = value
        elif field in (_CONTENT, _FLOATS, _DOUBLES) and isinstance(value, bytes):
            content = value
    if dtype == _FLOAT and len(content) == 4:  # noqa: PLR2004 - bytes of a float
        return _single(content)
    if dtype == _DOUBLE and len(content) == 8:  # noqa: PLR2004 - bytes of a double
        return float(struct.unpack("<d", content)[0])
    return None


def _single(data: bytes) -> float:
    """Return the shortest decimal that rounds to this single-precision number."""
    (value,) = struct.unpack("<f", data)
    for digits in range(1, _DIGITS_MAX):
        candidate = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", candidate) == data:
                return candidate
        except OverflowError:
            continue
    return float(value)


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield the number, the wire type and the value of each field of a message.

    Raises:
        Unreadable: The data is not a message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        size_bytes = {_EIGHT: 8, _FOUR: 4}.get(wire)
        if wire == _BYTES:
            size_bytes, at = _varint(data, at)
        if size_bytes is None or size_bytes > len(data) - at:
            raise Unreadable("a record is not a message of TensorBoard")
        yield number, wire, data[at : at + size_bytes]
        at += size_bytes


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift, byte in enumerate(data[at : at + _VARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:  # noqa: PLR2004 - the bit that says there are more
            return number, at + shift + 1
    raise Unreadable("a record is not a message of TensorBoard")
