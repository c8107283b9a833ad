"""Comparison of two checkpoints, with tensors in blocks of a few MiB."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from resilient.diff import rng
from resilient.diff.model import (
    SECTIONS,
    Comparison,
    FieldChange,
    Measures,
    OpaqueChange,
    TensorChange,
)
from resilient.diff.tensor_names import matched
from resilient.diff.tensor_reader import BLOCK_ELEMENTS, Elements
from resilient.diff.tensor_stats import (
    differing,
    gap,
    is_complex,
    is_float,
    is_known,
    native,
    ranks,
    values,
)
from resilient.layouts.model import MODEL, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from resilient.diff.model import CheckpointView
    from resilient.diff.tensor_names import Pair
    from resilient.layouts.model import Tensor


class DifferenceMeter:
    """Accumulator of the differences between two tensors, block by block.

    Args:
        before: Dtype of the first tensor, a name of safetensors.
        after: Dtype of the second tensor.
    """

    def __init__(self, before: str, after: str) -> None:
        self._dtypes = (before, after)
        self._elements = self._changed_count = 0
        self._max_abs = 0.0
        self._max_ulp: int | None = 0 if before == after and is_float(before) else None
        self._squares = [0.0, 0.0]
        self._apart = self._dot = 0.0
        self._nans = [0, 0]
        self._infinite = [0, 0]
        self._is_whole = before == after and not is_float(before) and not before.startswith("C")

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Add the same elements of both tensors, as little-endian bytes, one row per element."""
        self._elements += len(before)
        changed = differing(before, after) if self._dtypes[0] == self._dtypes[1] else None
        self._changed_count += changed or 0
        # Most blocks are equal, but their norms count too.
        value = values(before, self._dtypes[0])
        other = value if changed == 0 else values(after, self._dtypes[1])
        if changed is None:
            self._changed_count += _unequal(value, other, len(before))
        finite = np.isfinite(value) & np.isfinite(other)
        numbers = None
        if not finite.all():
            self._count(value, other)
            numbers = ~(np.isnan(value) | np.isnan(other))
            value, other = value[finite], other[finite]
        with np.errstate(over="ignore", invalid="ignore"):
            self._squares[0] += float(value @ value)
            self._squares[1] += float(other @ other)
            self._dot += float(value @ other)
            if changed != 0:
                self._add_distances(value - other)
        if changed and self._is_whole:
            self._max_abs = max(self._max_abs, float(self._gap(native, before, after, None)))
        if changed and self._max_ulp is not None:
            self._max_ulp = max(self._max_ulp, self._gap(ranks, before, after, numbers))

    def result(self) -> Measures:
        """Return the accumulated measures."""
        left, right = (math.sqrt(square) for square in self._squares)
        cosine = None
        if 0 < left < math.inf and 0 < right < math.inf:
            # The root of the product, so that equal tensors get an angle of exactly zero.
            cosine = max(-1.0, min(1.0, self._dot / math.sqrt(self._squares[0]) / right))
            cosine = 1.0 if not self._changed_count else cosine
        relative = math.sqrt(self._apart) / left if left else None if self._apart else 0.0
        return Measures(
            self._elements,
            self._changed_count,
            self._max_abs,
            relative if relative is None or math.isfinite(relative) else None,
            cosine,
            self._max_ulp,
            (left, right),
            (self._nans[0], self._nans[1]),
            (self._infinite[0], self._infinite[1]),
        )

    def _count(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> None:
        for number, side in enumerate((left, right)):
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
        """Return the largest distance of the results of ``read``, where both are numbers."""
        left, right = (read(side, self._dtypes[0]) for side in (before, after))
        return gap(left, right) if numbers is None else gap(left[numbers], right[numbers])


def _unequal(left: NDArray[np.float64], right: NDArray[np.float64], elements: int) -> int:
    """Return the number of elements with two values; a complex element has two numbers."""
    differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
    return int(differ.reshape(elements, -1).any(axis=1).sum()) if elements else 0


_TWINS_MAX, _PROBED = 4, 1024
_MISSING = object()
_Reading = tuple["_Block", Future[NDArray[np.uint8]], Future[NDArray[np.uint8]]]


def nobody(done: int, of: int) -> None:
    """Ignore progress."""


def compare(
    before: CheckpointView,
    after: CheckpointView,
    *,
    is_selected: Callable[[str], bool] = lambda _: True,
    on_progress: Callable[[int, int], None] = nobody,
) -> Comparison:
    """Compare two checkpoints.

    Crash: reads only. Memory is bounded by the blocks that are read ahead on both sides, and the
    headers.

    Args:
        before: One checkpoint.
        after: The other.
        is_selected: Predicate on a tensor's name, prefixed with its part, that selects it.
        on_progress: Function called with the bytes compared and the total bytes.

    Raises:
        StoreError: A checkpoint could not be read.
    """
    pairs, notes = matched(before, after)
    pairs = [pair for pair in pairs if is_selected(pair.name)]
    pairs, tied = _without_tied(pairs, (before, after))
    both = [(pair.name, pair.before, pair.after) for pair in pairs if pair.before and pair.after]
    only_before = tuple(pair.before for pair in pairs if pair.before and pair.after is None)
    only_after = tuple(pair.after for pair in pairs if pair.after and pair.before is None)
    changes = _Tensors(before, after, on_progress).measured(both)
    fields, equal_fields = _fields(before, after)
    opaque, unread = _opaque(before, after, fields)
    logs = (before.history, after.history)
    agreeing = next(
        (
            n
            for n, (left, right) in enumerate(zip(*logs, strict=False))
            if not _is_same(left, right)
        ),
        min(map(len, logs)),
    )
    return Comparison(
        before,
        after,
        tuple(fields),
        equal_fields,
        (len(logs[0]), len(logs[1]), agreeing),
        rng.compare(before.random, after.random),
        tuple(sorted(changes, key=_severity)),
        (only_before, only_after),
        tied,
        (
            *_side_notes("a", before.notes, unread[0]),
            *_side_notes("b", after.notes, unread[1]),
            *notes,
        ),
        opaque,
    )


def _side_notes(side: str, *notes: Sequence[str]) -> list[str]:
    return [f"{side}: {text}" for text in dict.fromkeys(chain(*notes))]


def _opaque(
    before: CheckpointView, after: CheckpointView, fields: Sequence[FieldChange]
) -> tuple[tuple[OpaqueChange, ...], tuple[Sequence[str], Sequence[str]]]:
    """Return the opaque changes, and the opaque content that each side could not read.

    Each layout has content that is not comparable with other layouts. A difference that a field
    shows is not reported again. Files of single ranks differ if the numbers of ranks do.
    """
    if before.layout != after.layout:
        return (), ((), ())
    (value, left), (other, right) = before.opaque(), after.opaque()
    changed_fields = {f"{change.name}." for change in fields}
    changes = []
    for place in sorted({*value, *other}):
        before_value, now = value.get(place), other.get(place)
        is_cut = before.world != after.world and any(
            opaque.is_cut for opaque in (before_value, now) if opaque
        )
        path = f"{place.partition(': ')[2] or place}."
        if is_cut or before_value == now or any(path.startswith(name) for name in changed_fields):
            continue
        changes.append(
            OpaqueChange(place, "a" if now is None else "b" if before_value is None else "both")
        )
    return tuple(changes), (left, right)


def _severity(change: TensorChange) -> tuple[float, str]:
    """Return a sort key: unreadable, then unequal NaN or infinities, most different, equal."""
    measures = change.measures
    if measures is None:
        return -float("inf"), change.name
    if change.is_equal:
        return 1.0, change.name
    if measures.nans[0] != measures.nans[1] or measures.infinite[0] != measures.infinite[1]:
        # larger than any finite distance
        return -1e301, change.name
    return -(measures.relative if measures.relative is not None else 1e300), change.name


def _fields(
    before: CheckpointView, after: CheckpointView
) -> tuple[list[FieldChange], dict[str, int]]:
    changes, equal_fields = [], {}
    for section in SECTIONS:
        value, other = before.fields.get(section, {}), after.fields.get(section, {})
        count = 0
        for name in [*value, *(name for name in other if name not in value)]:
            left, right = value.get(name, _MISSING), other.get(name, _MISSING)
            if left is _MISSING:
                changes.append(FieldChange(section, name, None, right, "b"))
            elif right is _MISSING:
                changes.append(FieldChange(section, name, left, None, "a"))
            elif _is_same(left, right):
                count += 1
            else:
                changes.append(FieldChange(section, name, left, right))
        equal_fields[section] = count
    return changes, equal_fields


def _is_same(left: object, right: object) -> bool:
    """Return True if two values are the same; NaN equals NaN."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(_is_same(*pair) for pair in pairs)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return left == right or (left != left and right != right)  # noqa: PLR0124 - NaN


def _without_tied(
    pairs: Sequence[Pair], sides: tuple[CheckpointView, CheckpointView]
) -> tuple[list[Pair], tuple[str, ...]]:
    """Remove tensors of one side that are a second copy of a tensor that both sides have.

    Some tools write tied weights once, others twice.
    """
    by_content: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for pair in pairs:
        if pair.before and pair.after:
            for number, tensor in enumerate((pair.before, pair.after)):
                by_content[number, tensor.part, tensor.shape, tensor.dtype].append(tensor)
    left, tied = [], []
    for pair in pairs:
        number = 1 if pair.before is None else 0
        alone = None if pair.before and pair.after else (pair.before, pair.after)[number]
        alike = by_content.get((number, MODEL, alone.shape, alone.dtype), []) if alone else []
        if alone and _is_copy(sides[number], alone, alike):
            tied.append(pair.name)
        else:
            left.append(pair)
    return left, tuple(tied)


def _is_copy(side: CheckpointView, alone: Tensor, alike: Sequence[Tensor]) -> bool:
    """Return True if a model tensor has exactly the bits of a similar one on its side."""
    if alone.part != MODEL or not alone.pieces or not alone.elements:
        return False
    if any(tensor.pieces == alone.pieces for tensor in alike):
        return True
    return any(_are_equal(side, alone, tensor) for tensor in alike[:_TWINS_MAX])


def _are_equal(side: CheckpointView, left: Tensor, right: Tensor) -> bool:
    try:
        first, second = (Elements(side.folder, side.listing, tensor) for tensor in (left, right))
        # Most differ, and a few elements show it.
        steps = [(0, min(_PROBED, left.elements))]
        steps += [(at, _count(left, at)) for at in range(0, left.elements, BLOCK_ELEMENTS)]
        return all(
            np.array_equal(first.read(start, count), second.read(start, count))
            for start, count in steps
        )
    except Unreadable:
        return False


def _count(tensor: Tensor, start: int) -> int:
    return min(BLOCK_ELEMENTS, tensor.elements - start)


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements of one tensor on both sides."""

    number: int
    start: int
    count: int
    before: Elements
    after: Elements


class _Tensors:
    """Comparison of pairs of tensors; the next block is read while one is measured."""

    def __init__(
        self, before: CheckpointView, after: CheckpointView, on_progress: Callable[[int, int], None]
    ) -> None:
        self._sides = (before, after)
        self._progress = on_progress
        self._meters: dict[int, DifferenceMeter] = {}
        self._failures: dict[int, str] = {}

    def measured(self, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> list[TensorChange]:
        """Return the changes of tensors that both sides have, by name."""
        of = sum(tensor.size_bytes for _, tensor, _ in pairs)
        done = 0
        waiting: deque[_Reading] = deque()
        # One thread for each side reads its blocks in order; no other thread reads that side.
        with ThreadPoolExecutor(1) as left, ThreadPoolExecutor(1) as right:
            for block in self._blocks(pairs):
                reading = left.submit(block.before.read, block.start, block.count)
                other = right.submit(block.after.read, block.start, block.count)
                waiting.append((block, reading, other))
                if len(waiting) > 1:
                    done += self._measure(*waiting.popleft())
                    self._progress(done, of)
            while waiting:
                done += self._measure(*waiting.popleft())
        return [self._change(number, *pair) for number, pair in enumerate(pairs)]

    def _blocks(self, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Iterator[_Block]:
        before, after = self._sides
        for number, (_, value, other) in enumerate(pairs):
            why = _incomparable(value, other)
            try:
                left = Elements(before.folder, before.listing, value)
                right = Elements(after.folder, after.listing, other)
            except Unreadable as error:
                why = why or str(error)
            if why:
                self._failures[number] = why
                continue
            self._meters[number] = DifferenceMeter(value.dtype, other.dtype)
            for start in range(0, value.elements, BLOCK_ELEMENTS):
                yield _Block(number, start, _count(value, start), left, right)

    def _measure(
        self, block: _Block, left: Future[NDArray[np.uint8]], right: Future[NDArray[np.uint8]]
    ) -> int:
        """Add a block that was read, and return its number of bytes on the first side."""
        try:
            read = left.result(), right.result()
        except Unreadable as error:
            self._failures[block.number] = str(error)
        else:
            self._meters[block.number].add(*read)
        return block.count * block.before.item_bytes

    def _change(self, number: int, name: str, left: Tensor, right: Tensor) -> TensorChange:
        shapes, dtypes = (left.shape, right.shape), (left.dtype, right.dtype)
        why = self._failures.get(number, "")
        if why:
            is_known_to_differ = left.elements != right.elements
            return TensorChange(
                name, left.part, shapes, dtypes, None, False if is_known_to_differ else None, why
            )
        measures = self._meters[number].result()
        is_equal = measures.changed == 0 and left.dtype == right.dtype and left.shape == right.shape
        return TensorChange(name, left.part, shapes, dtypes, measures, is_equal)


def _incomparable(left: Tensor, right: Tensor) -> str:
    """Return the reason why two tensors have no distance; empty if they have one."""
    is_number = left.elements == right.elements == 1
    if left.shape != right.shape and not is_number:
        return "the shapes differ"
    unknown = [side.dtype for side in (left, right) if not is_known(side.dtype)]
    if unknown:
        return f"unknown dtype: {unknown[0][:40]}"
    return "one is complex" if is_complex(left.dtype) != is_complex(right.dtype) else ""
