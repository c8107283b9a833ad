"""Bytes of any dtype as numbers, and how many representable numbers lie between two (pure)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

PLAIN: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "C128": "<c16",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1",
}  # fmt: skip
"""The dtypes that NumPy has, by their names in safetensors."""
_COMPLEX = {"C64": "F32", "C128": "F64", "C32": "F16"}
_NARROW = {
    "F8_E4M3": (4, 7, False), "F8_E5M2": (5, 15, True),
    "F8_E4M3FNUZ": (4, 8, False), "F8_E5M2FNUZ": (5, 16, False),
}  # fmt: skip
"""Bits of the exponent, its bias, and whether its highest value is for what is not finite."""
_FLOATS = {"F64", "F32", "F16", "BF16", *_NARROW, "F8_E8M0"}
_SCALE_BIAS, _SCALE_NAN = 127, 255
_WORD_BYTES = 8


def is_float(dtype: str) -> bool:
    """Say whether distances in representable numbers make sense."""
    return dtype in _FLOATS


def is_complex(dtype: str) -> bool:
    """Say whether an element is a pair of numbers."""
    return dtype in _COMPLEX


def is_known(dtype: str) -> bool:
    """Say whether :func:`values` can read it."""
    return dtype in PLAIN or dtype in _FLOATS or dtype in _COMPLEX or dtype == "BOOL"


def native(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return elements in the smallest dtype of NumPy that holds them; complex ones as pairs.

    Args:
        raw: little-endian bytes, one row for each element.
        dtype: a name of safetensors.
    """
    data = np.ascontiguousarray(raw)
    if dtype in _COMPLEX:
        return data.reshape(-1).view(PLAIN[_COMPLEX[dtype]])
    if dtype in PLAIN:
        return data.reshape(-1).view(PLAIN[dtype])
    if dtype == "BF16":
        halves = data.reshape(-1).view("<u2").astype(np.uint32)
        return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)
    if dtype == "BOOL":
        return data.reshape(-1).astype(np.bool_).astype(np.uint8)
    return _tables()[dtype][data.reshape(-1)]


def values(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Return elements as numbers of double precision; integers beyond 2^53 are rounded."""
    # A signalling NaN is a NaN, and no reason to warn.
    with np.errstate(invalid="ignore"):
        return native(raw, dtype).astype(np.float64)


def ranks(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return the place of each float among all representable ones; both zeros share theirs.

    Source: floats compared as sign and magnitude, Dawson, "Comparing Floating Point Numbers".
    """
    width = raw.shape[-1]
    data = np.ascontiguousarray(raw).reshape(-1)
    if dtype == "F8_E8M0":
        return data
    bits: NDArray[Any] = data.view(f"<i{width}")
    sign: NDArray[Any] = bits >> (8 * width - 1)  # minus one for what is negative
    size: NDArray[Any] = bits & ((1 << (8 * width - 1)) - 1)
    found: NDArray[Any] = (size ^ sign) - sign
    return found


def differing(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> int:
    """Return how many elements have other bits."""
    width = before.shape[-1]
    word = min(width, _WORD_BYTES)
    one, other = (
        np.ascontiguousarray(side).reshape(-1).view(f"<u{word}") for side in (before, after)
    )
    apart = one != other
    return int(np.count_nonzero(apart.reshape(-1, 2).any(axis=1) if width > word else apart))


def gap(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Return the largest distance of two arrays of whole numbers, exactly."""
    if not one.size:
        return 0
    low, high = np.minimum(one, other), np.maximum(one, other)
    if one.dtype.itemsize < _WORD_BYTES:
        return int(np.subtract(high, low, dtype=np.int64).max())
    # Modulo 2^64 the difference is right, even where it has no place in int64.
    return int((high.view(np.uint64) - low.view(np.uint64)).max())


_made: dict[str, NDArray[np.float32]] = {}


def _tables() -> Mapping[str, NDArray[np.float32]]:
    """Return the 256 values of each format of eight bits."""
    if not _made:
        _made.update({name: _table(partial(_narrow, name)) for name in _NARROW})
        _made["F8_E8M0"] = _table(_scale)
    return _made


def _table(value: Callable[[int], float]) -> NDArray[np.float32]:
    return np.array([value(byte) for byte in range(256)], dtype=np.float32)


def _scale(byte: int) -> float:
    return float("nan") if byte == _SCALE_NAN else 2.0 ** (byte - _SCALE_BIAS)


def _narrow(name: str, byte: int) -> float:
    """Return what a byte means: OCP 8-bit Floating Point (2023), and the FNUZ formats of ONNX."""
    exponent_bits, bias, has_infinity = _NARROW[name]
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte >> 7 else 1.0
    size = byte & 0x7F
    exponent, mantissa = size >> mantissa_bits, size & ((1 << mantissa_bits) - 1)
    if name.endswith("FNUZ") and byte == 0x80:  # noqa: PLR2004 - where minus zero would be
        return float("nan")
    if has_infinity and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if name == "F8_E4M3" and size == 0x7F:  # noqa: PLR2004 - all ones
        return float("nan")
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias))
    return float(sign * (1 + fraction) * 2.0 ** (exponent - bias))
