"""Pages of zeros within a tensor: what a loss of power leaves of a file in writing (pure).

A file system that had given a file its length, and not yet all of its bytes, reads the others as
zeros, in whole pages. Such a hole begins or ends where a page of the file does, and there no row of
a tensor begins but by chance; rows that are zero on purpose end with themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_BYTES = 4096
_PARTS = (1, 2, 3, 4, 6, 8)
"""Into so many equal ones a row is cut on purpose, as one of queries, keys and values is."""


class Pages:
    """Looks for a hole in one tensor whose bytes lie in one piece of a file.

    Args:
        start: where in the file they begin, in bytes.
        item_bytes: of an element.
        row: elements between two beginnings of rows.
    """

    def __init__(self, start: int, item_bytes: int, row: int) -> None:
        self._start = start
        self._item_bytes = item_bytes
        self._row = max(row, 1)
        self._first: tuple[int, int] | None = None
        self._is_usual = False
        self._columns: set[int] = set()

    @property
    def hole(self) -> tuple[int, int] | None:
        """Its first byte in the file and its length; None where zeros cut rows elsewhere too."""
        return None if self._is_usual else self._first

    def look(self, first: int, is_zero: NDArray[np.bool_]) -> None:
        """Look at a block of elements.

        Args:
            first: the element of the tensor that the block begins with.
            is_zero: of each element.
        """
        least = PAGE_BYTES // self._item_bytes
        if self._is_usual or np.count_nonzero(is_zero) < least:
            return
        edges: NDArray[Any] = np.flatnonzero(np.diff(is_zero, prepend=False, append=False))
        pairs = edges.reshape(-1, 2)
        for begin, end in pairs[pairs[:, 1] - pairs[:, 0] >= least].tolist():
            # A run that goes on beyond the block has no edge there.
            own = [one for one in (begin, end) if 0 < one < is_zero.size]
            cuts = [first + one for one in own if self._cuts_a_row(first + one)]
            if any(map(self._is_at_page, cuts)):
                at = self._start + (first + begin) * self._item_bytes
                self._first = self._first or (at, (end - begin) * self._item_bytes)
            elif cuts:
                self._is_usual = True
            # What is zero in several rows from the same column on was made so.
            columns = {one % self._row for one in cuts}
            self._is_usual |= not columns.isdisjoint(self._columns)
            self._columns |= columns

    def _cuts_a_row(self, element: int) -> bool:
        """Say whether an element is within a row, and not where a half of it or so begins."""
        column = element % self._row
        return all(column * parts % self._row for parts in _PARTS)

    def _is_at_page(self, element: int) -> bool:
        """Say whether a page of the file begins at an element, or within it or the one before."""
        behind = (self._start + element * self._item_bytes) % PAGE_BYTES
        return min(behind, PAGE_BYTES - behind) < self._item_bytes
