"""What one tensor looks like: a few numbers about all of its elements, and the first of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.comparison.numbers import PLAIN, is_complex, is_known, native, values
from resilient.comparison.reading import BLOCK_ELEMENTS, Elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from resilient.comparison.values import Side
    from resilient.layouts.values import Tensor

_NPY_MAGIC = b"\x93NUMPY\x01\x00"


@dataclass(frozen=True, slots=True)
class Summary:
    """A tensor in numbers; of what is finite, and None where nothing is.

    Attributes:
        low: the smallest element.
        high: the largest.
        mean: of all.
        deviation: standard deviation of all, as of a whole population.
        norm: L2.
        zeros: how many are zero.
        nans: how many are no number.
        infinite: how many are infinite.
        first: the first elements, row-major; of complex ones both parts.
    """

    low: float | None
    high: float | None
    mean: float | None
    deviation: float | None
    norm: float | None
    zeros: int
    nans: int
    infinite: int
    first: tuple[Any, ...]


def blocks(
    side: Side, tensor: Tensor, told: Callable[[int, int], None]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the elements of a tensor, row-major, as little-endian bytes with a row for each.

    Raises:
        Unreadable: it cannot be read by ranges, or is damaged.
        StoreError: it could not be read.
    """
    elements = Elements(side.folder, side.listing, tensor)
    for start in range(0, tensor.elements, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        yield elements.read(start, count)
        told((start + count) * elements.item_bytes, tensor.size_bytes)


def summarize(
    side: Side, tensor: Tensor, first: int, told: Callable[[int, int], None]
) -> Summary | None:
    """Return what a tensor looks like; None of a dtype whose numbers are not known.

    The mean and the deviation are merged from those of blocks (Chan, Golub and LeVeque, 1979), so
    that numbers far from zero lose nothing.

    Args:
        side: the checkpoint.
        tensor: one of its tensors.
        first: how many elements to show.
        told: called with bytes read and bytes in all.

    Raises:
        Unreadable: it cannot be read by ranges, or is damaged.
        StoreError: it could not be read.
    """
    if not is_known(tensor.dtype):
        return None
    sums = Sums()
    head: tuple[Any, ...] = ()
    for number, block in enumerate(blocks(side, tensor, told)):
        if number == 0:
            head = first_of(block, tensor.dtype, first)
        sums.add(values(block, tensor.dtype))
    return sums.result(head)


def first_of(block: NDArray[np.uint8], dtype: str, first: int) -> tuple[Any, ...]:
    """Return the first elements of a block; a complex number is two of them."""
    shown = first * (2 if is_complex(dtype) else 1)
    return tuple(native(block[:first], dtype)[:shown].tolist())


class Sums:
    """Adds up numbers, block by block."""

    def __init__(self) -> None:
        self._zeros = self._nans = self._infinite = self._count = 0
        self._low, self._high = math.inf, -math.inf
        self._mean = self._spread = self._squares = 0.0

    def add(self, found: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take in numbers, and return those that are finite."""
        self._nans += int(np.isnan(found).sum())
        self._infinite += int(np.isinf(found).sum())
        self._zeros += int((found == 0).sum())
        finite = found[np.isfinite(found)]
        if not finite.size:
            return finite
        self._low = min(self._low, float(finite.min()))
        self._high = max(self._high, float(finite.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            middle = float(finite.mean())
            apart, own = middle - self._mean, float(((finite - middle) ** 2).sum())
            both = self._count + finite.size
            self._spread += own + apart * apart * self._count * finite.size / both
            self._mean += apart * finite.size / both
            self._squares += float(finite @ finite)
        self._count += finite.size
        return finite

    def result(self, head: tuple[Any, ...] = ()) -> Summary:
        """Return what was added up; ``head`` are the first elements."""
        counts = (self._zeros, self._nans, self._infinite, head)
        if not self._count:
            return Summary(None, None, None, None, None, *counts)
        deviation, norm = math.sqrt(self._spread / self._count), math.sqrt(self._squares)
        return Summary(self._low, self._high, self._mean, deviation, norm, *counts)


def as_numpy(block: NDArray[np.uint8], dtype: str) -> bytes:
    """Return elements as the bytes that follow :func:`npy_head`."""
    return block.tobytes() if dtype in PLAIN or dtype == "BOOL" else native(block, dtype).tobytes()


def npy_head(tensor: Tensor) -> bytes:
    """Return the head of NumPy's file, version 1.0: magic, length u16, a dict, padded to 64.

    Source: ``numpy.lib.format``. The dtype is the tensor's, or F32 for those that NumPy lacks.
    """
    descr = "|b1" if tensor.dtype == "BOOL" else np.dtype(PLAIN.get(tensor.dtype, "<f4")).str
    text = repr({"descr": descr, "fortran_order": False, "shape": tensor.shape})
    fill = -(len(_NPY_MAGIC) + 2 + len(text) + 1) % 64
    data = (text + " " * fill + "\n").encode("latin1")
    return _NPY_MAGIC + len(data).to_bytes(2, "little") + data
