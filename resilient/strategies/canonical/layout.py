"""Where the numbers of a model lie when they are summed, and who sums which (pure).

Parameters are cut into blocks of fixed size and laid end to end. A block is what one rank sums,
measures and steps as a whole, at any world size: so no kernel ever sees a tensor whose length
depends on how many ranks there are.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 16_384
"""Elements of a block: so few that torch leaves one to one thread, and never cuts it in two."""


class Segment(NamedTuple):
    """A run of elements of one tensor.

    Attributes:
        tensor: its number.
        start: the first element.
        stop: the one after the last.
    """

    tensor: int
    start: int
    stop: int


class Window(NamedTuple):
    """What is exchanged at once: one run of the line for each rank, which that rank sums.

    Attributes:
        spans: by rank, (start, stop) on the line.
    """

    spans: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        """Elements of the longest span."""
        return max(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True)
class Line:
    """Tensors of one dtype laid end to end, and cut over ranks at the borders of blocks.

    Attributes:
        sizes: elements of each tensor.
        offsets: where each begins, and the end.
        cuts: where the span of each rank begins, and the end.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]

    def span(self, rank: int) -> tuple[int, int]:
        """Return (start, stop) of what a rank sums."""
        return self.cuts[rank], self.cuts[rank + 1]

    def segments(self, start: int, stop: int) -> list[Segment]:
        """Return the runs of tensors that lie between two places on the line."""
        found, place = [], start
        tensor = bisect_right(self.offsets, start) - 1
        while place < stop:
            begin, end = self.offsets[tensor], min(self.offsets[tensor + 1], stop)
            if end > place:
                found.append(Segment(tensor, place - begin, end - begin))
                place = end
            tensor += 1
        return found

    def run(self, tensor: int, rank: int) -> Segment:
        """Return the elements of a tensor that a rank sums; an empty run where it has none."""
        begin, size = self.offsets[tensor], self.sizes[tensor]
        start, stop = (min(max(cut - begin, 0), size) for cut in self.span(rank))
        return Segment(tensor, start, max(start, stop))

    def windows(self, elements: int) -> list[Window]:
        """Return all spans in pieces of at most ``elements`` for all ranks together."""
        ranks = len(self.cuts) - 1
        each = max(1, elements // ranks)
        most = max(self.cuts[rank + 1] - self.cuts[rank] for rank in range(ranks))
        return [
            Window(
                tuple(
                    (min(low + done, high), min(low + done + each, high))
                    for low, high in map(self.span, range(ranks))
                )
            )
            for done in range(0, most, each)
        ]


def line_of(sizes: Sequence[int], ranks: int) -> Line:
    """Return tensors laid end to end and cut over ranks, as evenly as blocks allow."""
    offsets = (0, *accumulate(sizes))
    borders = [
        begin + start
        for begin, size in zip(offsets, sizes, strict=False)
        for start in range(0, size, BLOCK)
    ] + [offsets[-1]]
    cuts = [0]
    for rank in range(1, ranks):
        wanted = offsets[-1] * rank / ranks
        above = min(bisect_right(borders, wanted), len(borders) - 1)
        nearest = min(borders[max(above - 1, 0)], borders[above], key=lambda at: abs(at - wanted))
        cuts.append(max(cuts[-1], nearest))
    return Line(tuple(sizes), offsets, (*cuts, offsets[-1]))
