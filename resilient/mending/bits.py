"""The one flipped bit that a checksum gives away (pure).

CRC-32 tells every place of one flipped bit from every other. In content of n bits a damage of
another kind looks like one flipped bit by chance once in 2^32 / n, so little content alone is
mended like this, and it has to be what it should be afterwards.
"""

from __future__ import annotations

import zlib

BYTES_MAX = 1 << 18
"""Content that is mended: chance would take it for mended wrongly once in two thousand."""


def _table() -> tuple[int, ...]:
    found = []
    for byte in range(256):
        register = byte
        for _ in range(8):
            register = register >> 1 ^ (0xEDB88320 if register & 1 else 0)
        found.append(register)
    return tuple(found)


_FORWARD = _table()
_BACKWARD = {one >> 24: byte for byte, one in enumerate(_FORWARD)}
_OF_LAST = {_FORWARD[1 << bit]: bit for bit in range(8)}


def with_bit_back(data: bytes, checksum: int) -> bytes | None:
    """Return the bytes with the one bit flipped back that gives their checksum, None without.

    Args:
        data: as they are.
        checksum: CRC-32 of what they were.
    """
    if len(data) > BYTES_MAX:
        return None
    trace = zlib.crc32(data) ^ checksum
    for back in range(len(data)):
        bit = _OF_LAST.get(trace)
        if bit is not None:
            found = bytearray(data)
            found[-1 - back] ^= 1 << bit
            return bytes(found)
        byte = _BACKWARD[trace >> 24]
        trace = (trace ^ _FORWARD[byte]) << 8 & 0xFFFFFFFF | byte
    return None
