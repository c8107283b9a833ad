"""Regions (boxes) inside global tensors, and names of dtypes as in safetensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CUT_AXES_MAX = 4


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box inside a global tensor: ``offsets[i] <= index[i] < offsets[i] + lengths[i]``.

    A scalar has empty offsets and lengths.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Return whether the box is the whole tensor of ``shape``."""
        return self.lengths == tuple(shape) and not any(self.offsets)

    def inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box is inside a tensor of ``shape``."""
        return len(self.offsets) == len(self.lengths) == len(shape) and all(
            0 <= offset and 0 <= length and offset + length <= extent
            for offset, length, extent in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def __str__(self) -> str:
        spans = (
            f"{start}:{start + length}"
            for start, length in zip(self.offsets, self.lengths, strict=True)
        )
        return f"[{','.join(spans)}]"


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is all of a tensor of ``shape``."""
    return Region((0,) * len(shape), tuple(shape))


def intersect(left: Region, right: Region) -> Region | None:
    """Return the box that both regions share, or None if they share no element."""
    offsets = tuple(map(max, left.offsets, right.offsets))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(left.offsets, left.lengths, right.offsets, right.lengths, strict=True)
    )
    lengths = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    return Region(offsets, lengths) if all(length > 0 for length in lengths) else None


def covers(shape: Sequence[int], regions: Sequence[Region]) -> bool:
    """Return whether ``regions`` cover every element of a tensor of ``shape`` exactly once."""
    total = math.prod(shape)
    if not all(region.inside(shape) for region in regions):
        return False
    if sum(region.size for region in regions) != total:
        return False
    boxes = [region for region in regions if region.size]
    cut = [
        axis
        for axis, extent in enumerate(shape)
        if any(box.lengths[axis] != extent for box in boxes)
    ]
    # The number of corners, and their memory, doubles with each axis. Few boxes are compared in
    # pairs.
    if len(cut) <= _CUT_AXES_MAX and 2 << len(cut) <= len(boxes):
        return _corners_cancel(shape, boxes, cut)
    return not _any_overlap(boxes)


def _any_overlap(boxes: Sequence[Region]) -> bool:
    """Return whether two of the non-empty ``boxes`` share an element, by comparing pairs."""
    ordered = sorted(boxes)
    return any(
        intersect(region, later_region)
        for index, region in enumerate(ordered)
        for later_region in ordered[index + 1 :]
        if not region.offsets or later_region.offsets[0] < region.offsets[0] + region.lengths[0]
    )


def _corners_cancel(shape: Sequence[int], boxes: Sequence[Region], axes: Sequence[int]) -> bool:
    """Return whether ``boxes`` cover each element as often as the whole tensor does: once.

    The cover count of the elements is a sum of boxes. A sum of boxes is determined by its corners,
    each counted with the parity of its far edges. Two sums are equal exactly if these counts are
    equal. The test is linear in the number of boxes, for any cuts.

    Args:
        shape: Shape of the tensor.
        boxes: Non-empty boxes inside the tensor.
        axes: Axes on which some box is shorter than the tensor.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for box, sign in ((whole(shape), -1), *((box, 1) for box in boxes)):
        offsets, lengths = box.offsets, box.lengths
        edges = [((offsets[axis], 1), (offsets[axis] + lengths[axis], -1)) for axis in axes]
        for corner in product(*edges):
            counts[tuple(at for at, _ in corner)] += sign * math.prod(side for _, side in corner)
    return not any(counts.values())


def row_runs(outer: Region, inner: Region) -> list[tuple[int, int]]:
    """Return the element runs (start, count) of ``inner`` inside ``outer`` laid out row-major.

    Both are in global coordinates and ``inner`` lies inside ``outer``. Runs are as long as the
    layout allows and in row-major order of ``inner``, so they can be read directly into the buffer
    of ``inner``.
    """
    if inner.size == 0:
        return []
    split_axes = _leading_split_axes(outer, inner)
    run = math.prod(inner.lengths[split_axes:])
    strides = row_strides(outer.lengths)
    base = sum(
        (offset - start) * stride
        for offset, start, stride in zip(inner.offsets, outer.offsets, strides, strict=True)
    )
    starts = [base]
    for axis in range(split_axes):
        starts = [
            start + index * strides[axis]
            for start in starts
            for index in range(inner.lengths[axis])
        ]
    return [(start, run) for start in starts]


def _leading_split_axes(outer: Region, inner: Region) -> int:
    """Return how many leading axes must be walked one index at a time."""
    axes = len(outer.lengths)
    while axes > 0 and inner.lengths[axes - 1] == outer.lengths[axes - 1]:
        axes -= 1
    return max(axes - 1, 0)


def spans(outer: Region, inner: Region, hole: int) -> list[tuple[Region, int, int]]:
    """Cut ``inner`` into boxes that are each in one run of ``outer`` laid out row-major.

    A run may have holes: elements of ``outer`` that are not in the box. Each hole is shorter than
    ``hole`` elements, because a new run is cheaper than reading a longer hole.

    Args:
        outer: Stored box, in global coordinates.
        inner: Box inside ``outer``, in global coordinates.
        hole: Number of elements; at least 1. With 1 every run is dense.

    Returns:
        (box, first element of its run in ``outer``, elements of the run), row-major.
    """
    if inner.size == 0:
        return []
    strides = row_strides(outer.lengths)
    reach = 1
    for axis in reversed(range(len(strides))):
        length = inner.lengths[axis]
        if length > 1 and strides[axis] - reach >= hole:
            slices = [_slice(inner, axis, index) for index in range(length)]
            return sorted(run for part in slices for run in spans(outer, part, hole))
        reach += (length - 1) * strides[axis]
    first = sum(
        (offset - start) * stride
        for offset, start, stride in zip(inner.offsets, outer.offsets, strides, strict=True)
    )
    return [(inner, first, reach)]


def flat_regions(shape: Sequence[int], start: int, count: int) -> list[Region]:
    """Cut a run of elements of a row-major tensor into as few boxes as possible.

    Args:
        shape: Shape of the whole tensor.
        start: First element of the run.
        count: Number of elements of the run; it ends inside the tensor.

    Returns:
        Boxes in the order of the run, at most two per axis, each contiguous in the run.
    """
    if count == 0:
        return []
    if not shape:
        return [Region((), ())]
    row = math.prod(shape[1:])
    stop = start + count
    first, last = -(-start // row), stop // row
    if first > last:
        return _in_row(shape, first - 1, start % row, count)
    boxes = _in_row(shape, first - 1, start % row, first * row - start)
    if last > first:
        row_shape = shape[1:]
        boxes.append(Region((first, *(0 for _ in row_shape)), (last - first, *row_shape)))
    return boxes + _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Sequence[int], row: int, start: int, count: int) -> list[Region]:
    """Return the boxes of a run that lies inside one row of the first axis."""
    return [
        Region((row, *region.offsets), (1, *region.lengths))
        for region in flat_regions(shape[1:], start, count)
    ]


def row_strides(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the stride in elements of each axis, laid out row-major."""
    return tuple(math.prod(lengths[axis + 1 :]) for axis in range(len(lengths)))


def _slice(box: Region, axis: int, index: int) -> Region:
    """Return one index of ``box`` along an axis."""
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[axis] += index
    lengths[axis] = 1
    return Region(tuple(offsets), tuple(lengths))


ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes per element of each dtype name that is written."""
