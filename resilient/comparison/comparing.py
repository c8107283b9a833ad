"""Two checkpoints held against each other, tensors in blocks of a few MiB."""

from __future__ import annotations

from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from resilient.comparison import randomness
from resilient.comparison.measuring import Meter
from resilient.comparison.naming import matched
from resilient.comparison.numbers import is_complex, is_known
from resilient.comparison.reading import BLOCK_ELEMENTS, Elements
from resilient.comparison.values import (
    SECTIONS,
    Comparison,
    FieldChange,
    OpaqueChange,
    TensorChange,
)
from resilient.layouts.values import MODEL, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from resilient.comparison.naming import Pair
    from resilient.comparison.values import Side
    from resilient.layouts.values import Tensor

_TWINS_MAX, _PROBED = 4, 1024
_MISSING = object()
_Reading = tuple["_Block", Future[NDArray[np.uint8]], Future[NDArray[np.uint8]]]


def nobody(done: int, of: int) -> None:
    """Take no note of progress."""


def compare(
    before: Side,
    after: Side,
    *,
    wanted: Callable[[str], bool] = lambda _: True,
    told: Callable[[int, int], None] = nobody,
) -> Comparison:
    """Return what is different, and how far apart.

    Crash: reads only. Memory is bounded by blocks, read ahead on both sides, and the headers.

    Args:
        before: one checkpoint.
        after: the other.
        wanted: says of a tensor by its name, the part before it, whether it is compared.
        told: called with bytes compared and bytes in all.

    Raises:
        StoreError: one of them could not be read.
    """
    pairs, notes = matched(before, after)
    pairs = [one for one in pairs if wanted(one.name)]
    pairs, tied = _without_tied(pairs, (before, after))
    both = [(one.name, one.before, one.after) for one in pairs if one.before and one.after]
    only_before = tuple(one.before for one in pairs if one.before and one.after is None)
    only_after = tuple(one.after for one in pairs if one.after and one.before is None)
    changes = _Tensors(before, after, told).measured(both)
    fields, same = _fields(before, after)
    opaque, unread = _opaque(before, after, fields)
    logs = (before.history, after.history)
    agreeing = next(
        (n for n, (one, other) in enumerate(zip(*logs, strict=False)) if not _is_same(one, other)),
        min(map(len, logs)),
    )
    return Comparison(
        before,
        after,
        tuple(fields),
        same,
        (len(logs[0]), len(logs[1]), agreeing),
        randomness.compare(before.random, after.random),
        tuple(sorted(changes, key=_severity)),
        (only_before, only_after),
        tied,
        (*_told("a", before.notes, unread[0]), *_told("b", after.notes, unread[1]), *notes),
        opaque,
    )


def _told(side: str, *notes: Sequence[str]) -> list[str]:
    return [f"{side}: {one}" for one in dict.fromkeys(chain(*notes))]


def _opaque(
    before: Side, after: Side, fields: Sequence[FieldChange]
) -> tuple[tuple[OpaqueChange, ...], tuple[Sequence[str], Sequence[str]]]:
    """Return what is not understood and differs, and what of it each side could not read.

    Two layouts keep things of their own, which nobody could hold against each other. What a field
    tells already is not told again. Of other numbers of ranks the files of ranks are others.
    """
    if before.layout != after.layout:
        return (), ((), ())
    (one, left), (other, right) = before.opaque(), after.opaque()
    told = {f"{change.name}." for change in fields}
    changes = []
    for place in sorted({*one, *other}):
        held, now = one.get(place), other.get(place)
        is_cut = before.world != after.world and any(it.is_cut for it in (held, now) if it)
        path = f"{place.partition(': ')[2] or place}."
        if is_cut or held == now or any(path.startswith(name) for name in told):
            continue
        changes.append(OpaqueChange(place, "a" if now is None else "b" if held is None else "both"))
    return tuple(changes), (left, right)


def _severity(change: TensorChange) -> tuple[float, str]:
    """Sort what cannot be told first, what is no number, the most different, and what is equal."""
    found = change.measures
    if found is None:
        return -float("inf"), change.name
    if change.is_equal:
        return 1.0, change.name
    if found.nans[0] != found.nans[1] or found.infinite[0] != found.infinite[1]:
        # Farther than any number.
        return -1e301, change.name
    return -(found.relative if found.relative is not None else 1e300), change.name


def _fields(before: Side, after: Side) -> tuple[list[FieldChange], dict[str, int]]:
    changes, same = [], {}
    for section in SECTIONS:
        one, other = before.fields.get(section, {}), after.fields.get(section, {})
        count = 0
        for name in [*one, *(name for name in other if name not in one)]:
            left, right = one.get(name, _MISSING), other.get(name, _MISSING)
            if left is _MISSING:
                changes.append(FieldChange(section, name, None, right, "b"))
            elif right is _MISSING:
                changes.append(FieldChange(section, name, left, None, "a"))
            elif _is_same(left, right):
                count += 1
            else:
                changes.append(FieldChange(section, name, left, right))
        same[section] = count
    return changes, same


def _is_same(one: object, other: object) -> bool:
    """Say whether two values are the same; NaN is the same as NaN."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_is_same(*pair) for pair in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, bool) != isinstance(other, bool):
        return False
    return one == other or (one != one and other != other)  # noqa: PLR0124 - NaN


def _without_tied(
    pairs: Sequence[Pair], sides: tuple[Side, Side]
) -> tuple[list[Pair], tuple[str, ...]]:
    """Take out what one side alone has, if it is a second copy of what both have.

    Weights that a model uses twice are written once by some tools, twice by others.
    """
    held: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for pair in pairs:
        if pair.before and pair.after:
            for number, one in enumerate((pair.before, pair.after)):
                held[number, one.part, one.shape, one.dtype].append(one)
    left, tied = [], []
    for pair in pairs:
        number = 1 if pair.before is None else 0
        alone = None if pair.before and pair.after else (pair.before, pair.after)[number]
        alike = held.get((number, MODEL, alone.shape, alone.dtype), []) if alone else []
        if alone and _is_copy(sides[number], alone, alike):
            tied.append(pair.name)
        else:
            left.append(pair)
    return left, tuple(tied)


def _is_copy(side: Side, alone: Tensor, alike: Sequence[Tensor]) -> bool:
    """Say whether a tensor of the model has the very bits of another one like it on its side."""
    if alone.part != MODEL or not alone.pieces or not alone.elements:
        return False
    if any(one.pieces == alone.pieces for one in alike):
        return True
    return any(_are_equal(side, alone, one) for one in alike[:_TWINS_MAX])


def _are_equal(side: Side, one: Tensor, other: Tensor) -> bool:
    try:
        first, second = (Elements(side.folder, side.listing, each) for each in (one, other))
        # Most are not, and a few elements show it.
        steps = [(0, min(_PROBED, one.elements))]
        steps += [(at, _count(one, at)) for at in range(0, one.elements, BLOCK_ELEMENTS)]
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
    """Measures pairs of tensors; while one block is measured, the next is read on both sides."""

    def __init__(self, before: Side, after: Side, told: Callable[[int, int], None]) -> None:
        self._sides = (before, after)
        self._told = told
        self._meters: dict[int, Meter] = {}
        self._failed: dict[int, str] = {}

    def measured(self, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> list[TensorChange]:
        """Return the changes of tensors that both sides have, by name."""
        of = sum(one.size_bytes for _, one, _ in pairs)
        done = 0
        waiting: deque[_Reading] = deque()
        # One thread for each side: its blocks are read in order, and by nobody else.
        with ThreadPoolExecutor(1) as left, ThreadPoolExecutor(1) as right:
            for block in self._blocks(pairs):
                one = left.submit(block.before.read, block.start, block.count)
                other = right.submit(block.after.read, block.start, block.count)
                waiting.append((block, one, other))
                if len(waiting) > 1:
                    done += self._measure(*waiting.popleft())
                    self._told(done, of)
            while waiting:
                done += self._measure(*waiting.popleft())
        return [self._change(number, *pair) for number, pair in enumerate(pairs)]

    def _blocks(self, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Iterator[_Block]:
        before, after = self._sides
        for number, (_, one, other) in enumerate(pairs):
            why = _incomparable(one, other)
            try:
                left = Elements(before.folder, before.listing, one)
                right = Elements(after.folder, after.listing, other)
            except Unreadable as error:
                why = why or str(error)
            if why:
                self._failed[number] = why
                continue
            self._meters[number] = Meter(one.dtype, other.dtype)
            for start in range(0, one.elements, BLOCK_ELEMENTS):
                yield _Block(number, start, _count(one, start), left, right)

    def _measure(
        self, block: _Block, one: Future[NDArray[np.uint8]], other: Future[NDArray[np.uint8]]
    ) -> int:
        """Take in a block that was read, and return how many bytes it had on the first side."""
        try:
            read = one.result(), other.result()
        except Unreadable as error:
            self._failed[block.number] = str(error)
        else:
            self._meters[block.number].add(*read)
        return block.count * block.before.item_bytes

    def _change(self, number: int, name: str, one: Tensor, other: Tensor) -> TensorChange:
        shapes, dtypes = (one.shape, other.shape), (one.dtype, other.dtype)
        why = self._failed.get(number, "")
        if why:
            is_known_to_differ = one.elements != other.elements
            return TensorChange(
                name, one.part, shapes, dtypes, None, False if is_known_to_differ else None, why
            )
        found = self._meters[number].result()
        is_equal = found.changed == 0 and one.dtype == other.dtype and one.shape == other.shape
        return TensorChange(name, one.part, shapes, dtypes, found, is_equal)


def _incomparable(one: Tensor, other: Tensor) -> str:
    """Return why two tensors have no distance, or nothing."""
    is_number = one.elements == other.elements == 1
    if one.shape != other.shape and not is_number:
        return "the shapes differ"
    unknown = [each.dtype for each in (one, other) if not is_known(each.dtype)]
    if unknown:
        return f"a dtype whose numbers are not known: {unknown[0][:40]}"
    return "one is complex" if is_complex(one.dtype) != is_complex(other.dtype) else ""
