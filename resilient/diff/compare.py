"""Comparison of two checkpoints, which reads tensors in blocks of a few MiB."""

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
        self._squared_distance = self._dot = 0.0
        self._nans = [0, 0]
        self._infinite = [0, 0]
        self._is_whole = before == after and not is_float(before) and not before.startswith("C")

    def add(self, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
        """Add the same elements of both tensors, as little-endian bytes, one row per element."""
        self._elements += len(before)
        changed_count = differing(before, after) if self._dtypes[0] == self._dtypes[1] else None
        self._changed_count += changed_count or 0
        # Most blocks are equal, but the norms include them.
        before_values = values(before, self._dtypes[0])
        after_values = before_values if changed_count == 0 else values(after, self._dtypes[1])
        if changed_count is None:
            self._changed_count += _unequal(before_values, after_values, len(before))
        finite = np.isfinite(before_values) & np.isfinite(after_values)
        numbers = None
        if not finite.all():
            self._count(before_values, after_values)
            numbers = ~(np.isnan(before_values) | np.isnan(after_values))
            before_values, after_values = before_values[finite], after_values[finite]
        with np.errstate(over="ignore", invalid="ignore"):
            self._squares[0] += float(before_values @ before_values)
            self._squares[1] += float(after_values @ after_values)
            self._dot += float(before_values @ after_values)
            if changed_count != 0:
                self._add_distances(before_values - after_values)
        if changed_count and self._is_whole:
            self._max_abs = max(self._max_abs, float(self._gap(native, before, after, None)))
        if changed_count and self._max_ulp is not None:
            self._max_ulp = max(self._max_ulp, self._gap(ranks, before, after, numbers))

    def result(self) -> Measures:
        """Return the accumulated measures."""
        before_norm, after_norm = (math.sqrt(square) for square in self._squares)
        cosine = None
        if 0 < before_norm < math.inf and 0 < after_norm < math.inf:
            # Divide by one norm after the other, because their product may overflow.
            cosine = max(-1.0, min(1.0, self._dot / math.sqrt(self._squares[0]) / after_norm))
            cosine = 1.0 if not self._changed_count else cosine
        relative = (
            math.sqrt(self._squared_distance) / before_norm
            if before_norm
            else None
            if self._squared_distance
            else 0.0
        )
        return Measures(
            self._elements,
            self._changed_count,
            self._max_abs,
            relative if relative is None or math.isfinite(relative) else None,
            cosine,
            self._max_ulp,
            (before_norm, after_norm),
            (self._nans[0], self._nans[1]),
            (self._infinite[0], self._infinite[1]),
        )

    def _count(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> None:
        for number, side in enumerate((left, right)):
            self._nans[number] += int(np.isnan(side).sum())
            self._infinite[number] += int(np.isinf(side).sum())

    def _add_distances(self, differences: NDArray[np.float64]) -> None:
        self._squared_distance += float(differences @ differences)
        if differences.size and not self._is_whole:
            self._max_abs = max(self._max_abs, float(np.abs(differences).max()))

    def _gap(
        self,
        read: Callable[[NDArray[np.uint8], str], NDArray[Any]],
        before: NDArray[np.uint8],
        after: NDArray[np.uint8],
        numbers: NDArray[np.bool_] | None,
    ) -> int:
        """Return the largest distance of the results of ``read`` for elements that are numbers."""
        before_values, after_values = (read(side, self._dtypes[0]) for side in (before, after))
        return (
            gap(before_values, after_values)
            if numbers is None
            else gap(before_values[numbers], after_values[numbers])
        )


def _unequal(left: NDArray[np.float64], right: NDArray[np.float64], elements: int) -> int:
    """Return the number of unequal elements; a complex element has two numbers."""
    differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
    return int(differ.reshape(elements, -1).any(axis=1).sum()) if elements else 0


_TWINS_MAX, _PROBED = 4, 1024
_MISSING = object()
_Reading = tuple["_Block", Future[NDArray[np.uint8]], Future[NDArray[np.uint8]]]


def ignore_progress(done: int, of: int) -> None:
    """Ignore progress."""


def compare(
    before: CheckpointView,
    after: CheckpointView,
    *,
    is_selected: Callable[[str], bool] = lambda _: True,
    on_progress: Callable[[int, int], None] = ignore_progress,
) -> Comparison:
    """Compare two checkpoints.

    Crash: reads only. Memory is bounded by the headers and by the blocks that are read ahead on
    both sides.

    Args:
        before: One checkpoint.
        after: The other.
        is_selected: Predicate that selects tensors, on the name with the part as a prefix.
        on_progress: Function called with the bytes compared and the total bytes.

    Raises:
        StoreError: A checkpoint could not be read.
    """
    pairs, notes = matched(before, after)
    pairs = [pair for pair in pairs if is_selected(pair.name)]
    pairs, tied = _without_tied(pairs, (before, after))
    common_pairs = [
        (pair.name, pair.before, pair.after) for pair in pairs if pair.before and pair.after
    ]
    only_before = tuple(pair.before for pair in pairs if pair.before and pair.after is None)
    only_after = tuple(pair.after for pair in pairs if pair.after and pair.before is None)
    changes = _Tensors(before, after, on_progress).measured(common_pairs)
    fields, equal_fields = _fields(before, after)
    opaque, unread_notes = _opaque(before, after, fields)
    logs = (before.history, after.history)
    agreeing_entries = next(
        (
            n
            for n, (before_entry, after_entry) in enumerate(zip(*logs, strict=False))
            if not _is_same(before_entry, after_entry)
        ),
        min(map(len, logs)),
    )
    return Comparison(
        before,
        after,
        tuple(fields),
        equal_fields,
        (len(logs[0]), len(logs[1]), agreeing_entries),
        rng.compare(before.random, after.random),
        tuple(sorted(changes, key=_severity)),
        (only_before, only_after),
        tied,
        (
            *_side_notes("a", before.notes, unread_notes[0]),
            *_side_notes("b", after.notes, unread_notes[1]),
            *notes,
        ),
        opaque,
    )


def _side_notes(side: str, *notes: Sequence[str]) -> list[str]:
    return [f"{side}: {text}" for text in dict.fromkeys(chain(*notes))]


def _opaque(
    before: CheckpointView, after: CheckpointView, fields: Sequence[FieldChange]
) -> tuple[tuple[OpaqueChange, ...], tuple[Sequence[str], Sequence[str]]]:
    """Return the opaque changes, and notes on unreadable opaque content.

    Each layout has content that is not comparable with other layouts. The result omits a difference
    that a field already shows. If the numbers of ranks differ, files of single ranks always differ.
    """
    if before.layout != after.layout:
        return (), ((), ())
    (before_digests, before_unread), (after_digests, after_unread) = before.opaque(), after.opaque()
    changed_fields = {f"{change.name}." for change in fields}
    changes = []
    for place in sorted({*before_digests, *after_digests}):
        before_value, after_value = before_digests.get(place), after_digests.get(place)
        is_cut = before.world != after.world and any(
            opaque.is_cut for opaque in (before_value, after_value) if opaque
        )
        path = f"{place.partition(': ')[2] or place}."
        if (
            is_cut
            or before_value == after_value
            or any(path.startswith(name) for name in changed_fields)
        ):
            continue
        changes.append(
            OpaqueChange(
                place, "a" if after_value is None else "b" if before_value is None else "both"
            )
        )
    return tuple(changes), (before_unread, after_unread)


def _severity(change: TensorChange) -> tuple[float, str]:
    """Return a sort key: unreadable, unequal NaN or infinities, largest difference, equal."""
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
        before_fields, after_fields = before.fields.get(section, {}), after.fields.get(section, {})
        count = 0
        for name in [*before_fields, *(name for name in after_fields if name not in before_fields)]:
            before_value, after_value = (
                before_fields.get(name, _MISSING),
                after_fields.get(name, _MISSING),
            )
            if before_value is _MISSING:
                changes.append(FieldChange(section, name, None, after_value, "b"))
            elif after_value is _MISSING:
                changes.append(FieldChange(section, name, before_value, None, "a"))
            elif _is_same(before_value, after_value):
                count += 1
            else:
                changes.append(FieldChange(section, name, before_value, after_value))
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
    """Remove tensors of one side that are tied to a tensor that both sides have.

    Some tools write tied weights once, and others twice.
    """
    by_content: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for pair in pairs:
        if pair.before and pair.after:
            for number, tensor in enumerate((pair.before, pair.after)):
                by_content[number, tensor.part, tensor.shape, tensor.dtype].append(tensor)
    untied_pairs, tied = [], []
    for pair in pairs:
        number = 1 if pair.before is None else 0
        unpaired_tensor = None if pair.before and pair.after else (pair.before, pair.after)[number]
        same_shaped = (
            by_content.get((number, MODEL, unpaired_tensor.shape, unpaired_tensor.dtype), [])
            if unpaired_tensor
            else []
        )
        if unpaired_tensor and _is_copy(sides[number], unpaired_tensor, same_shaped):
            tied.append(pair.name)
        else:
            untied_pairs.append(pair)
    return untied_pairs, tuple(tied)


def _is_copy(side: CheckpointView, alone: Tensor, alike: Sequence[Tensor]) -> bool:
    """Return True if a model tensor has the same bits as a similar tensor of its side."""
    if alone.part != MODEL or not alone.pieces or not alone.elements:
        return False
    if any(tensor.pieces == alone.pieces for tensor in alike):
        return True
    return any(_are_equal(side, alone, tensor) for tensor in alike[:_TWINS_MAX])


def _are_equal(side: CheckpointView, left: Tensor, right: Tensor) -> bool:
    try:
        first, second = (Elements(side.folder, side.listing, tensor) for tensor in (left, right))
        # Compare a few elements first, because most tensors differ.
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
    """Elements of one tensor from both sides."""

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
        """Return the changes of the tensors that both sides have, by name."""
        total_bytes = sum(tensor.size_bytes for _, tensor, _ in pairs)
        measured_bytes = 0
        pending_blocks: deque[_Reading] = deque()
        # One thread per side reads the blocks of this side in order.
        with ThreadPoolExecutor(1) as before_reader, ThreadPoolExecutor(1) as after_reader:
            for block in self._blocks(pairs):
                before_reading = before_reader.submit(block.before.read, block.start, block.count)
                after_reading = after_reader.submit(block.after.read, block.start, block.count)
                pending_blocks.append((block, before_reading, after_reading))
                if len(pending_blocks) > 1:
                    measured_bytes += self._measure(*pending_blocks.popleft())
                    self._progress(measured_bytes, total_bytes)
            while pending_blocks:
                measured_bytes += self._measure(*pending_blocks.popleft())
        return [self._change(number, *pair) for number, pair in enumerate(pairs)]

    def _blocks(self, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Iterator[_Block]:
        before, after = self._sides
        for number, (_, before_tensor, after_tensor) in enumerate(pairs):
            reason = _incomparable(before_tensor, after_tensor)
            try:
                before_elements = Elements(before.folder, before.listing, before_tensor)
                after_elements = Elements(after.folder, after.listing, after_tensor)
            except Unreadable as error:
                reason = reason or str(error)
            if reason:
                self._failures[number] = reason
                continue
            self._meters[number] = DifferenceMeter(before_tensor.dtype, after_tensor.dtype)
            for start in range(0, before_tensor.elements, BLOCK_ELEMENTS):
                yield _Block(
                    number, start, _count(before_tensor, start), before_elements, after_elements
                )

    def _measure(
        self, block: _Block, left: Future[NDArray[np.uint8]], right: Future[NDArray[np.uint8]]
    ) -> int:
        """Add a block, and return its number of bytes on the first side."""
        try:
            block_bytes = left.result(), right.result()
        except Unreadable as error:
            self._failures[block.number] = str(error)
        else:
            self._meters[block.number].add(*block_bytes)
        return block.count * block.before.item_bytes

    def _change(self, number: int, name: str, left: Tensor, right: Tensor) -> TensorChange:
        shapes, dtypes = (left.shape, right.shape), (left.dtype, right.dtype)
        reason = self._failures.get(number, "")
        if reason:
            is_known_to_differ = left.elements != right.elements
            return TensorChange(
                name, left.part, shapes, dtypes, None, False if is_known_to_differ else None, reason
            )
        measures = self._meters[number].result()
        is_equal = measures.changed == 0 and left.dtype == right.dtype and left.shape == right.shape
        return TensorChange(name, left.part, shapes, dtypes, measures, is_equal)


def _incomparable(left: Tensor, right: Tensor) -> str:
    """Return the reason why two tensors are not comparable; empty for comparable tensors."""
    is_number = left.elements == right.elements == 1
    if left.shape != right.shape and not is_number:
        return "the shapes differ"
    unknown_dtypes = [side.dtype for side in (left, right) if not is_known(side.dtype)]
    if unknown_dtypes:
        return f"unknown dtype: {unknown_dtypes[0][:40]}"
    return "one is complex" if is_complex(left.dtype) != is_complex(right.dtype) else ""
