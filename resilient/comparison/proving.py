"""Every byte of a checkpoint that another tool wrote: its checksums, and its numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.comparison.numbers import is_complex, is_float, values
from resilient.comparison.pages import Pages
from resilient.comparison.reading import BLOCK_ELEMENTS, Elements, ReadAhead
from resilient.comparison.stale_copies import stale_copies
from resilient.layouts.checksums import BEHIND, check_bytes
from resilient.layouts.plain import ALONE
from resilient.layouts.scanning import Risk, scan
from resilient.layouts.values import ITEM_BITS, MODEL, OPTIMIZER, Cure, Form, Problem, Unreadable
from resilient.layouts.weights import SAFE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.values import Contents, Tensor
    from resilient.storage.folder import Folder, Listing

_NAMED_MAX = 16
"""Tensors that are named."""


def prove(folder: Folder, listing: Listing, contents: Contents) -> tuple[Problem, ...]:
    """Return what is wrong with the bytes; what headers say is in ``contents`` already.

    Reads everything: checksums of files of torch and of slices, and all numbers of weights and
    of the optimizer: none may be NaN, no square negative, not all numbers of a file zero, nor those
    of a page of it that cuts a row, and infinite ones are told. A number far beyond the scale of
    its tensor is told too, and a file that is that of an older step beside it.

    Args:
        folder: where it is.
        listing: what is there.
        contents: what :func:`resilient.layouts.recognizing.read_layout` said of it.

    Raises:
        StoreError: it could not be read.
    """
    found = [*check_bytes(folder, listing), *_dangers(folder, listing)]
    # That it holds weights alone is no damage of theirs.
    told = [one for one in contents.problems if one.is_fatal and one.what != ALONE]
    broken = [*(one for one in found if one.what != BEHIND), *told]
    spoiled = {one.place for one in broken}
    near = ReadAhead(folder, listing)
    # Numbers of a file that is damaged anyway say nothing of what was saved.
    tensors = [
        one
        for one in contents.tensors
        if one.part in (MODEL, OPTIMIZER) and not spoiled & set(one.files)
    ]
    stale = stale_copies(folder, listing, contents)
    return (*found, *_odd_numbers(near, listing, tensors), *stale)


RISKS = "resilient ckpt scan {path}"
"""Help against a file that runs code in its usual loader."""


def _dangers(folder: Folder, listing: Listing) -> Iterator[Problem]:
    """Yield what would run code, or lead elsewhere, in whoever loads it the usual way."""
    for one in scan(folder, listing):
        if one.risk is Risk.DANGER:
            is_fatal = one.file not in listing.outside
            yield Problem(one.file, one.what, is_fatal=is_fatal, help=RISKS)


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many elements of a tensor are of a kind."""

    nans: int = 0
    infinite: int = 0
    negative: int = 0
    nonzero: int = 0
    first: float = 0.0
    hole: tuple[int, int] | None = None
    top: float = 0.0
    others: float = 0.0


def _odd_numbers(near: Folder, listing: Listing, tensors: list[Tensor]) -> Iterator[Problem]:
    spared: set[str] = set()
    steps: dict[Tensor, float] = {}
    found = list(islice(_each(near, listing, tensors, spared, steps), _NAMED_MAX))
    yield from found
    if len(found) == _NAMED_MAX:
        return  # not all were looked at
    yield from _out_of_step(steps)
    weights = {name: None for one in tensors if one.part == MODEL for name in one.files}
    for name in weights:
        if name not in spared and listing.sizes.get(name, 0) >= _ZEROS_BYTES:
            yield Problem(name, _ZEROS, is_fatal=True, cure=Cure.COPY)


def _each(
    near: Folder,
    listing: Listing,
    tensors: list[Tensor],
    spared: set[str],
    steps: dict[Tensor, float],
) -> Iterator[Problem]:
    """Yield what is wrong with each tensor; note files with more than zeros, and all steps."""
    for one in tensors:
        if not (is_float(one.dtype) or is_complex(one.dtype)) or not one.pieces:
            spared.update(one.files)  # it was not looked at
            continue
        try:
            counts = _counted(near, listing, one)
        except Unreadable as error:
            spared.update(one.files)
            yield Problem(one.files[0], f"`{one.name[:80]}`: {error}", is_fatal=True)
            continue
        if counts.nonzero:
            # Of one that is cut over files nobody counted each piece: all of them pass.
            spared.update(one.files)
        if one.part == OPTIMIZER and one.name.endswith(".step") and one.elements == 1:
            steps[one] = counts.first
        problem = _odd(one, counts)
        if problem is not None:
            yield problem


def _out_of_step(steps: dict[Tensor, float]) -> Iterator[Problem]:
    """Yield the first parameter that was updated more or less often than most.

    It may be so: one that got no gradient, or was set free later, is behind.
    """
    if len(set(steps.values())) > 1:
        most, _ = Counter(steps.values()).most_common(1)[0]
        one = next(one for one, step in steps.items() if step != most)
        what = f"`{one.name[:80]}` is {steps[one]:g}, and most others are {most:g}"
        yield Problem(one.files[0], what, cure=Cure.COPY)


def _odd(tensor: Tensor, counts: _Counts) -> Problem | None:
    """Return what is wrong with a tensor's numbers."""
    name, place = tensor.name[:80], tensor.files[0]
    if counts.nans or counts.infinite:
        what = f"`{name}` has {counts.nans} NaN and {counts.infinite} infinite of {tensor.elements}"
        loses = "" if counts.nans else f"finite numbers in the {_WORDS[tensor.part]}"
        return Problem(place, what, loses, is_fatal=bool(counts.nans), cure=Cure.EARLIER)
    if counts.negative and tensor.part == OPTIMIZER and tensor.name.endswith(_SQUARES):
        what = f"`{name}` has {counts.negative} negative of {tensor.elements}, and is of squares"
        return Problem(place, what, is_fatal=True)
    if _is_beyond(counts, tensor.dtype):
        times = f"{counts.top / counts.others:.0e}" if counts.others else "more than 1e15"
        what = f"`{name}` has a number of {counts.top:.0e}, {times} times the mean of its others"
        return Problem(place, f"{what}: {_BEYOND}", is_fatal=True, cure=Cure.COPY)
    if counts.hole and counts.nonzero:
        at, length = counts.hole
        what = f"`{name}` has {length} bytes of zeros from byte {at} of the file on, whole pages: "
        return Problem(place, what + _HOLE, is_fatal=True, cure=Cure.COPY)
    return None


_WORDS = {MODEL: "weights", OPTIMIZER: "optimizer's state"}
_SQUARES = ("exp_avg_sq", "square_avg")
"""Of which an optimizer takes the root: of a negative one it is NaN."""
_ZEROS = "every number in it is zero, as in a file whose bytes a loss of power took"
_ZEROS_BYTES = 4096
_SCALES_MAX = 1e15
_BEYOND = "a flipped bit makes that, and a step spoils all weights"
_MASKS = {"F64": float(np.finfo("f8").max), "F32": float(np.finfo("f4").max), "BF16": 3.38e38}
"""The most negative number of a dtype stands in masks."""
_HOLE = "a loss of power takes bytes like that"


def _is_beyond(counts: _Counts, dtype: str) -> bool:
    """Return True for a largest number that no training reaches, and that no mask is made of."""
    is_mask = counts.top >= _MASKS.get(dtype, np.inf)
    return counts.top > max(_SCALES_MAX, _SCALES_MAX * counts.others) and not is_mask


def _counted(near: Folder, listing: Listing, tensor: Tensor) -> _Counts:
    """Return how many elements are NaN, infinite, negative, and not zero."""
    elements = Elements(near, listing, tensor)
    nans = infinite = negative = nonzero = 0
    first, pages, scale = 0.0, _pages(tensor), _Scale()
    for start in range(0, tensor.elements, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        numbers = values(elements.read(start, count), tensor.dtype)
        if tensor.elements == 1 and not is_complex(tensor.dtype):
            first = float(numbers.flat[0])
        nans += int(np.isnan(numbers).sum())
        infinite += int(np.isinf(numbers).sum())
        negative += 0 if is_complex(tensor.dtype) else int((numbers < 0).sum())
        nonzero += int(np.count_nonzero(numbers))
        scale.look(numbers)
        if pages:
            pages.look(start, np.equal(numbers, 0))
    hole = pages.hole if pages else None
    top, others = scale.result()
    return _Counts(nans, infinite, negative, nonzero, first, hole, top, others)


class _Scale:
    """Largest of some numbers, and the mean of all others."""

    def __init__(self) -> None:
        self._top, self._sum, self._count = 0.0, 0.0, 0

    def look(self, numbers: Any) -> None:
        """Take some more numbers."""
        sizes = np.abs(numbers).ravel()
        if sizes.size and not np.isfinite(sizes.max()):
            sizes = sizes[np.isfinite(sizes)]
        if not sizes.size:
            return
        top = float(sizes.max())
        self._sum += float(sizes.sum(dtype=np.float64)) - top + min(self._top, top)
        self._top = max(self._top, top)
        self._count += sizes.size

    def result(self) -> tuple[float, float]:
        """Return the largest number and the mean of the others; zeros where there are no others."""
        return (self._top, self._sum / (self._count - 1)) if self._count > 1 else (0.0, 0.0)


def _pages(tensor: Tensor) -> Pages | None:
    """Return what looks for holes in a tensor that lies as it is in a file without checksums."""
    piece = tensor.pieces[0]
    is_plain = piece.form is Form.BYTES and piece.file.endswith(SAFE) and not tensor.pieces[1:]
    if not is_plain or is_complex(tensor.dtype):
        return None
    row = tensor.shape[-1] if tensor.shape[1:] else tensor.elements
    return Pages(piece.start, ITEM_BITS[tensor.dtype] // 8, row)
