"""Every byte of a checkpoint that another tool wrote: its checksums, and its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from resilient.comparison.numbers import is_complex, is_float, values
from resilient.comparison.reading import BLOCK_ELEMENTS, Elements, ReadAhead
from resilient.layouts.checksums import BEHIND, check_bytes
from resilient.layouts.plain import ALONE
from resilient.layouts.scanning import Risk, scan
from resilient.layouts.values import MODEL, OPTIMIZER, Problem, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.values import Contents, Tensor
    from resilient.storage.folder import Folder, Listing

_NAMED_MAX = 16
"""Tensors that are named."""


def prove(folder: Folder, listing: Listing, contents: Contents) -> tuple[Problem, ...]:
    """Return what is wrong with the bytes; what headers say is in ``contents`` already.

    Reads everything: checksums of files of torch and of slices, and all numbers of weights and
    of the optimizer, of which none may be NaN and infinite ones are told.

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
    return (*found, *_not_finite(near, listing, tensors))


def _dangers(folder: Folder, listing: Listing) -> Iterator[Problem]:
    """Yield what would run code, or lead elsewhere, in whoever loads it the usual way."""
    for one in scan(folder, listing):
        if one.risk is Risk.DANGER:
            is_fatal = one.file not in listing.outside
            yield Problem(one.file, one.what, is_fatal=is_fatal, help="resilient ckpt scan {path}")


def _not_finite(near: Folder, listing: Listing, tensors: list[Tensor]) -> Iterator[Problem]:
    told = 0
    for one in tensors:
        if not (is_float(one.dtype) or is_complex(one.dtype)) or not one.pieces:
            continue
        try:
            nans, infinite = _counted(near, listing, one)
        except Unreadable as error:
            yield Problem(one.files[0], f"`{one.name[:80]}`: {error}", is_fatal=True)
            continue
        if not nans and not infinite:
            continue
        what = f"`{one.name[:80]}` has {nans} NaN and {infinite} infinite of {one.elements}"
        loses = "" if nans else f"finite numbers in the {_WORDS[one.part]}"
        yield Problem(one.files[0], what, loses, is_fatal=bool(nans))
        told += 1
        if told >= _NAMED_MAX:
            return


_WORDS = {MODEL: "weights", OPTIMIZER: "optimizer's state"}


def _counted(near: Folder, listing: Listing, tensor: Tensor) -> tuple[int, int]:
    """Return how many elements are NaN, and how many are infinite."""
    elements = Elements(near, listing, tensor)
    nans = infinite = 0
    for start in range(0, tensor.elements, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        numbers = values(elements.read(start, count), tensor.dtype)
        nans += int(np.isnan(numbers).sum())
        infinite += int(np.isinf(numbers).sum())
    return nans, infinite
