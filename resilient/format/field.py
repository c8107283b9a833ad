"""Arithmetic of bytes for parity: the field GF(256), and a code whose first row is plain XOR.

Addition is XOR; multiplication is that of polynomials over GF(2) modulo x^8+x^4+x^3+x^2+1
(0x11D, as in RAID-6 and most Reed-Solomon codes). The code is systematic: byte ``p`` of parity row
``i`` is the sum over the group's files ``j`` of ``coefficient(i, j)`` times their byte ``p``. The
coefficients are a Cauchy matrix with its columns scaled so that row 0 is all ones, and every
square part of such a matrix can be inverted: so any ``k`` losses can be solved for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    Matrix = list[list[int]]
    Bytes = bytes | bytearray | memoryview

POLYNOMIAL = 0x11D
SHARES_MAX = 256
"""Files and parity rows of one group together; the field has no more elements."""

_BLOCK_BYTES = 1 << 18


def _exponents() -> list[int]:
    powers, value = [], 1
    for _ in range(255):
        powers.append(value)
        value <<= 1
        value ^= POLYNOMIAL if value > 0xFF else 0  # noqa: PLR2004 - a byte
    return powers * 2


_EXP = _exponents()
_LOG = {value: power for power, value in enumerate(_EXP[:255])}


def multiply(one: int, other: int) -> int:
    """Return the product of two bytes."""
    return _EXP[_LOG[one] + _LOG[other]] if one and other else 0


def invert(value: int) -> int:
    """Return what ``value``, not 0, must be multiplied with to give 1."""
    return _EXP[255 - _LOG[value]]


def coefficient(row: int, column: int) -> int:
    """Return what parity row ``row`` multiplies file ``column`` of its group with.

    Together fewer than ``SHARES_MAX`` rows and columns, or it divides by 0.
    """
    return multiply(255 ^ column, invert((255 - row) ^ column))


def solve(lost: Sequence[int], rows: Sequence[int]) -> Matrix:
    """Return how to compute lost files of a group from the sums of as many parity rows.

    The sum of a row is its parity plus the row's coefficients times the files that are there.

    Args:
        lost: the columns that are lost, each once.
        rows: as many parity rows, each once.

    Returns:
        For each lost column, in order, the factors of the rows' sums, in order.
    """
    assert len(lost) == len(rows), "as many unknowns as equations"  # noqa: S101
    return _inverted([[coefficient(row, column) for column in lost] for row in rows])


def add(total: bytearray, terms: Sequence[tuple[int, Bytes]]) -> None:
    """Add to the head of ``total``, in place, the sum of (factor, bytes), none longer."""
    import numpy as np

    sums = np.frombuffer(total, np.uint8)
    # In pieces that stay in the processor's cache until all terms are in.
    for start in range(0, len(total), _BLOCK_BYTES):
        for factor, data in terms:
            piece = memoryview(data)[start : start + _BLOCK_BYTES]
            if not factor or not len(piece):
                continue
            term = piece if factor == 1 else bytes(piece).translate(_products(factor))
            head = sums[start : start + len(piece)]
            np.bitwise_xor(head, np.frombuffer(term, np.uint8), out=head)


@lru_cache(SHARES_MAX)
def _products(factor: int) -> bytes:
    return bytes(multiply(factor, value) for value in range(256))


def _inverted(matrix: Matrix) -> Matrix:
    """Return the inverse of a small square matrix, by Gauss and Jordan."""
    size = len(matrix)
    work = [[*line, *(int(at == own) for at in range(size))] for own, line in enumerate(matrix)]
    for step in range(size):
        pivot = next(at for at in range(step, size) if work[at][step])
        work[step], work[pivot] = work[pivot], work[step]
        scale = invert(work[step][step])
        work[step] = [multiply(scale, value) for value in work[step]]
        for at in range(size):
            if at != step:
                work[at] = _reduced(work[at], work[at][step], work[step])
    return [line[size:] for line in work]


def _reduced(line: list[int], factor: int, by: list[int]) -> Any:
    return [value ^ multiply(factor, other) for value, other in zip(line, by, strict=True)]
