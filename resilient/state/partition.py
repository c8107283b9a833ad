"""Which rank writes which region of the state that all ranks hold; pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from resilient.format.dtypes import ITEM_BYTES
from resilient.format.regions import Region, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPLIT_BYTES_MIN = 256 << 10


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its data: name, safetensors dtype name, global shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Length of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Partition = tuple[tuple[tuple[TensorSpec, Region], ...], ...]
"""For each rank, the regions that it writes."""


def partition(specs: Sequence[TensorSpec], ranks: int) -> Partition:
    """Return who writes what: every element once, bytes split evenly over the ranks.

    The tensors are laid end to end and the line is cut in ``ranks`` equal pieces. A tensor that a
    cut runs through is split between two rows; a small one goes whole to the rank that holds
    its middle.

    Args:
        specs: the same on every rank, in the same order.
        ranks: how many write.
    """
    total = sum(spec.size_bytes for spec in specs)
    cuts = [total * rank / ranks for rank in range(ranks + 1)]
    written: list[list[tuple[TensorSpec, Region]]] = [[] for _ in range(ranks)]
    begin = 0
    for spec in specs:
        for rank, region in _pieces(spec, begin, cuts):
            written[rank].append((spec, region))
        begin += spec.size_bytes
    return tuple(tuple(one) for one in written)


def _pieces(spec: TensorSpec, begin: int, cuts: Sequence[float]) -> list[tuple[int, Region]]:
    """Return (rank, region) for one tensor whose bytes begin at ``begin`` on the line."""
    ranks = len(cuts) - 1
    if spec.size_bytes < _SPLIT_BYTES_MIN or not spec.shape:
        middle = begin + spec.size_bytes / 2
        owner = next(rank for rank in range(ranks) if middle < cuts[rank + 1] or rank == ranks - 1)
        return [(owner, whole(spec.shape))]
    rows = spec.shape[0]
    row_bytes = spec.size_bytes / rows
    edges = [min(max(round((cut - begin) / row_bytes), 0), rows) for cut in cuts]
    edges[0], edges[-1] = 0, rows
    rest = spec.shape[1:]
    return [
        (rank, Region((first, *(0 for _ in rest)), (last - first, *rest)))
        for rank, (first, last) in enumerate(pairwise(edges))
        if last > first
    ]
