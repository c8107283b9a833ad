"""How far two tensors are from each other, block by block (pure)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.comparison.numbers import differing, gap, is_float, native, ranks, values
from resilient.comparison.values import Measures

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class Meter:
    """Adds up what blocks of two tensors say.

    Args:
        before: dtype of the first, a name of safetensors.
        after: dtype of the second.
    """

    def __init__(self, before: str, after: str) -> None:
        self._dtypes = (before, after)
        self._elements = self._changed = 0
        self._max_abs = 0.0
        self._max_ulp: int | None = 0 if before == after and is_float(before) else None
        self._squares = [0.0, 0.0]
        self._apart = self._dot = 0.0
        self._nans = [0, 0]
        self._infinite = [0, 0]
        self._is_whole = before == after and not is_float(before) and not before.startswith("C")

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Take in the same elements of both, as little-endian bytes with a row for each."""
        self._elements += len(before)
        changed = differing(before, after) if self._dtypes[0] == self._dtypes[1] else None
        self._changed += changed or 0
        # Most of what is compared is the same; its norms count all the same.
        one = values(before, self._dtypes[0])
        other = one if changed == 0 else values(after, self._dtypes[1])
        if changed is None:
            self._changed += _unequal(one, other, len(before))
        finite = np.isfinite(one) & np.isfinite(other)
        numbers = None
        if not finite.all():
            self._count(one, other)
            numbers = ~(np.isnan(one) | np.isnan(other))
            one, other = one[finite], other[finite]
        with np.errstate(over="ignore", invalid="ignore"):
            self._squares[0] += float(one @ one)
            self._squares[1] += float(other @ other)
            self._dot += float(one @ other)
            if changed != 0:
                self._add_distances(one - other)
        if changed and self._is_whole:
            self._max_abs = max(self._max_abs, float(self._gap(native, before, after, None)))
        if changed and self._max_ulp is not None:
            self._max_ulp = max(self._max_ulp, self._gap(ranks, before, after, numbers))

    def result(self) -> Measures:
        """Return what was added up."""
        one, other = (math.sqrt(square) for square in self._squares)
        cosine = None
        if 0 < one < math.inf and 0 < other < math.inf:
            # The root of the product, so that what is equal has an angle of nothing.
            cosine = max(-1.0, min(1.0, self._dot / math.sqrt(self._squares[0]) / other))
            cosine = 1.0 if not self._changed else cosine
        relative = math.sqrt(self._apart) / one if one else None if self._apart else 0.0
        return Measures(
            self._elements,
            self._changed,
            self._max_abs,
            relative if relative is None or math.isfinite(relative) else None,
            cosine,
            self._max_ulp,
            (one, other),
            (self._nans[0], self._nans[1]),
            (self._infinite[0], self._infinite[1]),
        )

    def _count(self, one: NDArray[np.float64], other: NDArray[np.float64]) -> None:
        for number, side in enumerate((one, other)):
            self._nans[number] += int(np.isnan(side).sum())
            self._infinite[number] += int(np.isinf(side).sum())

    def _add_distances(self, apart: NDArray[np.float64]) -> None:
        self._apart += float(apart @ apart)
        if apart.size and not self._is_whole:
            self._max_abs = max(self._max_abs, float(np.abs(apart).max()))

    def _gap(
        self,
        read: Callable[[NDArray[np.uint8], str], NDArray[Any]],
        before: NDArray[np.uint8],
        after: NDArray[np.uint8],
        numbers: NDArray[np.bool_] | None,
    ) -> int:
        """Return the largest distance of what ``read`` makes of both, where both are numbers."""
        one, other = (read(side, self._dtypes[0]) for side in (before, after))
        return gap(one, other) if numbers is None else gap(one[numbers], other[numbers])


def _unequal(one: NDArray[np.float64], other: NDArray[np.float64], elements: int) -> int:
    """Return how many elements have two values; a complex one has two numbers."""
    differ = (one != other) & ~(np.isnan(one) & np.isnan(other))
    return int(differ.reshape(elements, -1).any(axis=1).sum()) if elements else 0
