"""How the numbers of a tensor are spread: counted in one pass, in memory that does not grow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from resilient.comparison.numbers import is_complex, is_float, is_known, values
from resilient.comparison.reading import BLOCK_ELEMENTS, Elements
from resilient.comparison.summing import Sums

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from resilient.comparison.summing import Summary
    from resilient.comparison.values import Side
    from resilient.layouts.values import Tensor

CELLS_MAX = 4096
BLOCKS_MAX = 64
"""Of a larger tensor so many blocks are looked at, evenly spread: 64 million elements."""
_DEEPEST = -1074
"""The exponent of the smallest number of double precision."""
_FINEST_BITS = 40
_FAR_BITS = 60
"""A cell's number has at most 41 bits: farther apart, all of a sign share one cell."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Counts in cells of equal width, a power of two; their edges are multiples of it.

    Attributes:
        exponent: of the width.
        first: the lowest cell begins at so many widths.
        counts: how many numbers each cell has, rising.
    """

    exponent: int
    first: int
    counts: tuple[int, ...]

    def edge(self, nth: int) -> float:
        """Return where a cell begins."""
        return math.ldexp(float(self.first + nth), self.exponent)

    def coarser(self, exponent: int) -> Bars:
        """Return the same in wider cells; not one number changes its side of an edge."""
        if not self.counts or exponent <= self.exponent:
            return self
        first, counts = _merged(self.first, np.array(self.counts), exponent - self.exponent)
        return Bars(exponent, first, tuple(counts.tolist()))

    def at_most(self, cells: int) -> Bars:
        """Return the same in as many cells as a picture has room for."""
        found = self
        while len(found.counts) > cells:
            found = found.coarser(found.exponent + 1)
        return found


@dataclass(frozen=True, slots=True)
class Histogram:
    """A tensor's numbers.

    Attributes:
        elements: how many it has.
        seen: how many were looked at; fewer than all of a very large one.
        summary: of those, in numbers.
        bars: of what is finite, by value.
        powers: the same without zeros: how many lie from each power of two to the next.
    """

    elements: int
    seen: int
    summary: Summary
    bars: Bars
    powers: tuple[tuple[int, int], ...]


def histogram(
    side: Side,
    tensor: Tensor,
    told: Callable[[int, int], None] = lambda *_: None,
    blocks_max: int = BLOCKS_MAX,
) -> Histogram | None:
    """Return how the numbers of a tensor are spread; None of a dtype that is not known.

    Args:
        side: the checkpoint.
        tensor: one of its tensors.
        told: called with bytes read and bytes in all.
        blocks_max: how many blocks to look at, of a million elements each.

    Raises:
        Unreadable: it cannot be read by ranges, or is damaged.
        StoreError: it could not be read.
    """
    if not is_known(tensor.dtype):
        return None
    elements = Elements(side.folder, side.listing, tensor)
    sums, powers = Sums(), np.zeros(-_DEEPEST + 1025, np.int64)
    cells = Cells(is_whole=not (is_float(tensor.dtype) or is_complex(tensor.dtype)))
    seen = 0
    starts = list(_starts(tensor.elements, blocks_max))
    for number, start in enumerate(starts, 1):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        finite = sums.add(values(elements.read(start, count), tensor.dtype))
        cells.add(finite)
        _count_powers(powers, finite)
        seen += count
        told(number, len(starts))
    found = tuple((int(one) + _DEEPEST, int(powers[one])) for one in np.flatnonzero(powers))
    return Histogram(tensor.elements, seen, sums.result(), cells.result(), found)


def alike(found: Sequence[Histogram]) -> tuple[Bars, ...]:
    """Return the values of several tensors in cells of one width."""
    widest = max((one.bars.exponent for one in found if one.bars.counts), default=0)
    return tuple(one.bars.coarser(widest) for one in found)


def _starts(elements: int, blocks_max: int) -> Iterator[int]:
    """Yield where blocks begin: all of them, or as many as may be, from the first to the last."""
    blocks = -(-elements // BLOCK_ELEMENTS)
    if blocks <= blocks_max:
        yield from range(0, elements, BLOCK_ELEMENTS)
        return
    for nth in range(blocks_max):
        yield nth * (blocks - 1) // max(1, blocks_max - 1) * BLOCK_ELEMENTS


def _count_powers(powers: NDArray[np.int64], finite: NDArray[np.float64]) -> None:
    _, exponents = np.frexp(finite[finite != 0])
    powers += np.bincount(exponents - 1 - _DEEPEST, minlength=len(powers))


class Cells:
    """Counts numbers in cells that grow with their range; the order of the blocks says nothing.

    Args:
        is_whole: whether they are whole numbers, which no cell is narrower than.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self._least = 0 if is_whole else _DEEPEST
        self._low, self._high = math.inf, -math.inf
        self._exponent: int | None = None
        self._first, self._counts = 0, np.zeros(0, np.int64)

    def add(self, finite: NDArray[np.float64]) -> None:
        """Take in numbers, all of them finite."""
        if not finite.size:
            return
        self._low = min(self._low, float(finite.min()))
        self._high = max(self._high, float(finite.max()))
        exponent = _exponent_of(self._low, self._high, self._least)
        if self._exponent is not None and exponent > self._exponent:
            grown = exponent - self._exponent
            self._first, self._counts = _merged(self._first, self._counts, grown)
        self._exponent = exponent
        cells = np.floor(np.ldexp(finite, -exponent)).astype(np.int64)
        # What is too small for a quotient of its own is below zero all the same.
        cells -= (finite < 0) & (cells == 0)
        first = int(cells.min())
        self._join(first, np.bincount(cells - first))

    def result(self) -> Bars:
        """Return the counts."""
        return Bars(self._exponent or 0, self._first, tuple(self._counts.tolist()))

    def _join(self, first: int, counts: NDArray[np.int64]) -> None:
        if not self._counts.size:
            self._first, self._counts = first, counts
            return
        low = min(first, self._first)
        high = max(first + len(counts), self._first + len(self._counts))
        joined = np.zeros(high - low, np.int64)
        for begin, some in ((first, counts), (self._first, self._counts)):
            joined[begin - low : begin - low + len(some)] += some
        self._first, self._counts = low, joined


def _exponent_of(low: float, high: float, least: int) -> int:
    """Return the least exponent whose cells are few enough from one number to the other."""
    largest = max(abs(low), abs(high))
    if largest == 0:
        return least  # zero is at the edge of a cell of any width
    exponent = max(least, math.frexp(largest)[1] - _FINEST_BITS)
    while _cell(high, exponent) - _cell(low, exponent) >= CELLS_MAX:
        exponent += 1
    return exponent


def _cell(value: float, exponent: int) -> int:
    found = math.floor(math.ldexp(value, -exponent))
    return -1 if value < 0 and found == 0 else found


def _merged(first: int, counts: NDArray[np.int64], bits: int) -> tuple[int, NDArray[np.int64]]:
    """Return cells that are ``2 ** bits`` times as wide."""
    numbers = (first + np.arange(len(counts), dtype=np.int64)) >> min(bits, _FAR_BITS)
    merged = np.zeros(int(numbers[-1] - numbers[0]) + 1, np.int64)
    np.add.at(merged, numbers - numbers[0], counts)
    return int(numbers[0]), merged
