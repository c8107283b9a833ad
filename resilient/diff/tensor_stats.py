"""Statistics of tensors of any dtype: values, distances, summaries and histograms.

The functions compute all values block by block in one pass, in bounded memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.diff.tensor_reader import BLOCK_ELEMENTS, Elements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from resilient.diff.model import CheckpointView
    from resilient.layouts.model import Tensor

PLAIN: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "C128": "<c16",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1",
}  # fmt: skip
"""Dtypes of NumPy by their safetensors names."""
_COMPLEX = {"C64": "F32", "C128": "F64", "C32": "F16"}
_NARROW = {
    "F8_E4M3": (4, 7, False), "F8_E5M2": (5, 15, True),
    "F8_E4M3FNUZ": (4, 8, False), "F8_E5M2FNUZ": (5, 16, False),
}  # fmt: skip
"""Number of exponent bits, bias, and whether the highest exponent encodes infinity and NaN."""
_FLOATS = {"F64", "F32", "F16", "BF16", *_NARROW, "F8_E8M0"}
_SCALE_BIAS, _SCALE_NAN = 127, 255
_WORD_BYTES = 8


def is_float(dtype: str) -> bool:
    """Return True for floating-point dtypes, which have distances in representable numbers."""
    return dtype in _FLOATS


def is_complex(dtype: str) -> bool:
    """Return True if an element is a pair of numbers."""
    return dtype in _COMPLEX


def is_known(dtype: str) -> bool:
    """Return True if :func:`values` can read the dtype."""
    return dtype in PLAIN or dtype in _FLOATS or dtype in _COMPLEX or dtype == "BOOL"


def native(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return elements in the smallest NumPy dtype that fits; complex elements as pairs.

    Args:
        raw: Little-endian bytes, one row per element.
        dtype: A name of safetensors.
    """
    data = np.ascontiguousarray(raw)
    if dtype in _COMPLEX:
        return data.reshape(-1).view(PLAIN[_COMPLEX[dtype]])
    if dtype in PLAIN:
        return data.reshape(-1).view(PLAIN[dtype])
    if dtype == "BF16":
        halves = data.reshape(-1).view("<u2").astype(np.uint32)
        return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)
    if dtype == "BOOL":
        return data.reshape(-1).astype(np.bool_).astype(np.uint8)
    return _tables()[dtype][data.reshape(-1)]


def values(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float64]:
    """Return elements in double precision; integers beyond 2^53 are rounded."""
    # Suppress NumPy's warning about a signalling NaN, which counts as NaN.
    with np.errstate(invalid="ignore"):
        return native(raw, dtype).astype(np.float64)


def ranks(raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return the rank of each float among all representable floats; both zeros share a rank.

    Source: floats compared as sign and magnitude, Dawson, "Comparing Floating Point Numbers".
    """
    width = raw.shape[-1]
    data = np.ascontiguousarray(raw).reshape(-1)
    if dtype == "F8_E8M0":
        return data
    bits: NDArray[Any] = data.view(f"<i{width}")
    sign: NDArray[Any] = bits >> (8 * width - 1)  # -1 for negative numbers
    size: NDArray[Any] = bits & ((1 << (8 * width - 1)) - 1)
    ordered_bits: NDArray[Any] = (size ^ sign) - sign
    return ordered_bits


def differing(before: NDArray[np.uint8], after: NDArray[np.uint8]) -> int:
    """Return the number of elements whose bits differ."""
    width = before.shape[-1]
    word = min(width, _WORD_BYTES)
    before_words, after_words = (
        np.ascontiguousarray(side).reshape(-1).view(f"<u{word}") for side in (before, after)
    )
    is_different = before_words != after_words
    return int(
        np.count_nonzero(is_different.reshape(-1, 2).any(axis=1) if width > word else is_different)
    )


def gap(left: NDArray[Any], right: NDArray[Any]) -> int:
    """Return the exact largest distance between two arrays of integers."""
    if not left.size:
        return 0
    low, high = np.minimum(left, right), np.maximum(left, right)
    if left.dtype.itemsize < _WORD_BYTES:
        return int(np.subtract(high, low, dtype=np.int64).max())
    # The difference is correct modulo 2^64, even if it does not fit in int64.
    return int((high.view(np.uint64) - low.view(np.uint64)).max())


_made: dict[str, NDArray[np.float32]] = {}


def _tables() -> Mapping[str, NDArray[np.float32]]:
    """Return the 256 values of each 8-bit format."""
    if not _made:
        _made.update({name: _table(partial(_narrow, name)) for name in _NARROW})
        _made["F8_E8M0"] = _table(_scale)
    return _made


def _table(value: Callable[[int], float]) -> NDArray[np.float32]:
    return np.array([value(byte) for byte in range(256)], dtype=np.float32)


def _scale(byte: int) -> float:
    return float("nan") if byte == _SCALE_NAN else 2.0 ** (byte - _SCALE_BIAS)


def _narrow(name: str, byte: int) -> float:
    """Return the value of a byte: OCP 8-bit Floating Point (2023), and the FNUZ formats of ONNX."""
    exponent_bits, bias, has_infinity = _NARROW[name]
    mantissa_bits = 7 - exponent_bits
    sign = -1.0 if byte >> 7 else 1.0
    size = byte & 0x7F
    exponent, mantissa = size >> mantissa_bits, size & ((1 << mantissa_bits) - 1)
    if name.endswith("FNUZ") and byte == 0x80:  # noqa: PLR2004 - where minus zero would be
        return float("nan")
    if has_infinity and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if name == "F8_E4M3" and size == 0x7F:  # noqa: PLR2004 - all ones
        return float("nan")
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias))
    return float(sign * (1 + fraction) * 2.0 ** (exponent - bias))


_NPY_MAGIC = b"\x93NUMPY\x01\x00"


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary statistics of a tensor's finite elements; None if no element is finite.

    Attributes:
        low: Smallest element.
        high: Largest element.
        mean: Mean.
        deviation: Population standard deviation.
        norm: L2 norm.
        zeros: Number of zeros.
        nans: Number of NaN elements.
        infinite: Number of infinite elements.
        first: First elements in row-major order, with both parts of complex elements.
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
    side: CheckpointView, tensor: Tensor, on_progress: Callable[[int, int], None]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the elements of a tensor, row-major, as little-endian bytes, one row per element.

    Raises:
        Unreadable: The tensor cannot be read by ranges, or is damaged.
        StoreError: A file could not be read.
    """
    elements = Elements(side.folder, side.listing, tensor)
    for start in range(0, tensor.elements, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        yield elements.read(start, count)
        on_progress((start + count) * elements.item_bytes, tensor.size_bytes)


def summarize(
    side: CheckpointView, tensor: Tensor, first: int, on_progress: Callable[[int, int], None]
) -> Summary | None:
    """Return summary statistics of a tensor; None for a dtype that is not known.

    The mean and the deviation are merged block by block (Chan, Golub and LeVeque, 1979), so numbers
    far from zero lose no precision.

    Args:
        side: The checkpoint.
        tensor: One of its tensors.
        first: Number of first elements to return.
        on_progress: Function called with the bytes read and the total bytes.

    Raises:
        Unreadable: The tensor cannot be read by ranges, or is damaged.
        StoreError: A file could not be read.
    """
    if not is_known(tensor.dtype):
        return None
    sums = SummaryAccumulator()
    head: tuple[Any, ...] = ()
    for number, block in enumerate(blocks(side, tensor, on_progress)):
        if number == 0:
            head = first_of(block, tensor.dtype, first)
        sums.add(values(block, tensor.dtype))
    return sums.result(head)


def first_of(block: NDArray[np.uint8], dtype: str, first: int) -> tuple[Any, ...]:
    """Return the first elements of a block; a complex number counts as two elements."""
    number_count = first * (2 if is_complex(dtype) else 1)
    return tuple(native(block[:first], dtype)[:number_count].tolist())


class SummaryAccumulator:
    """Accumulator of summary statistics, block by block."""

    def __init__(self) -> None:
        self._zeros = self._nans = self._infinite = self._count = 0
        self._low, self._high = math.inf, -math.inf
        self._mean = self._squared_deviation = self._squares = 0.0

    def add(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Add numbers, and return the finite ones."""
        self._nans += int(np.isnan(numbers).sum())
        self._infinite += int(np.isinf(numbers).sum())
        self._zeros += int((numbers == 0).sum())
        finite = numbers[np.isfinite(numbers)]
        if not finite.size:
            return finite
        self._low = min(self._low, float(finite.min()))
        self._high = max(self._high, float(finite.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            middle = float(finite.mean())
            mean_shift, squared_deviation = (
                middle - self._mean,
                float(((finite - middle) ** 2).sum()),
            )
            total_count = self._count + finite.size
            self._squared_deviation += (
                squared_deviation
                + mean_shift * mean_shift * self._count * finite.size / total_count
            )
            self._mean += mean_shift * finite.size / total_count
            self._squares += float(finite @ finite)
        self._count += finite.size
        return finite

    def result(self, head: tuple[Any, ...] = ()) -> Summary:
        """Return the summary; ``head`` are the first elements."""
        counts = (self._zeros, self._nans, self._infinite, head)
        if not self._count:
            return Summary(None, None, None, None, None, *counts)
        deviation, norm = math.sqrt(self._squared_deviation / self._count), math.sqrt(self._squares)
        return Summary(self._low, self._high, self._mean, deviation, norm, *counts)


def as_numpy(block: NDArray[np.uint8], dtype: str) -> bytes:
    """Return elements as the bytes that follow :func:`npy_head`."""
    return block.tobytes() if dtype in PLAIN or dtype == "BOOL" else native(block, dtype).tobytes()


def npy_head(tensor: Tensor) -> bytes:
    """Return the header of a NumPy file, version 1.0: magic, length u16, a dict, padded to 64.

    Source: ``numpy.lib.format``. The dtype is the tensor's, or F32 for a dtype that NumPy lacks.
    """
    descr = "|b1" if tensor.dtype == "BOOL" else np.dtype(PLAIN.get(tensor.dtype, "<f4")).str
    text = repr({"descr": descr, "fortran_order": False, "shape": tensor.shape})
    fill = -(len(_NPY_MAGIC) + 2 + len(text) + 1) % 64
    data = (text + " " * fill + "\n").encode("latin1")
    return _NPY_MAGIC + len(data).to_bytes(2, "little") + data


CELLS_MAX = 4096
BLOCKS_MAX = 64
"""Number of evenly spread blocks that are sampled from a larger tensor (64 million elements)."""
_DEEPEST = -1074
"""Exponent of the smallest double-precision number."""
_FINEST_BITS = 40
_FAR_BITS = 60
"""Largest useful shift of a bin number, beyond which all numbers of one sign share a bin."""


@dataclass(frozen=True, slots=True)
class HistogramBins:
    """Counts in bins whose width is a power of two; the edges are multiples of the width.

    Attributes:
        exponent: Exponent of the width.
        first: Lower edge of the first bin, in widths.
        counts: Numbers per bin, ascending.
    """

    exponent: int
    first: int
    counts: tuple[int, ...]

    def edge(self, nth: int) -> float:
        """Return the lower edge of a bin."""
        return math.ldexp(float(self.first + nth), self.exponent)

    def coarser(self, exponent: int) -> HistogramBins:
        """Return the histogram with wider bins; no number crosses an edge."""
        if not self.counts or exponent <= self.exponent:
            return self
        first, counts = _merged(self.first, np.array(self.counts), exponent - self.exponent)
        return HistogramBins(exponent, first, tuple(counts.tolist()))

    def at_most(self, cells: int) -> HistogramBins:
        """Return the histogram with at most ``cells`` bins."""
        bins = self
        while len(bins.counts) > cells:
            bins = bins.coarser(bins.exponent + 1)
        return bins


@dataclass(frozen=True, slots=True)
class Histogram:
    """Histogram of a tensor.

    Attributes:
        elements: Number of elements.
        seen: Number of counted elements, which is smaller than ``elements`` for a very large
            tensor.
        summary: Summary statistics of the counted elements.
        bars: Finite elements by value.
        powers: Nonzero finite elements by power of two: exponent and count.
    """

    elements: int
    seen: int
    summary: Summary
    bars: HistogramBins
    powers: tuple[tuple[int, int], ...]


def histogram(
    side: CheckpointView,
    tensor: Tensor,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    blocks_max: int = BLOCKS_MAX,
) -> Histogram | None:
    """Return the histogram of a tensor; None for a dtype that is not known.

    Args:
        side: The checkpoint.
        tensor: One of its tensors.
        on_progress: Function called with the blocks read and the total blocks.
        blocks_max: Largest number of blocks to read, of a million elements each.

    Raises:
        Unreadable: The tensor cannot be read by ranges, or is damaged.
        StoreError: A file could not be read.
    """
    if not is_known(tensor.dtype):
        return None
    elements = Elements(side.folder, side.listing, tensor)
    sums, powers = SummaryAccumulator(), np.zeros(-_DEEPEST + 1025, np.int64)
    cells = HistogramAccumulator(is_whole=not (is_float(tensor.dtype) or is_complex(tensor.dtype)))
    counted_elements = 0
    starts = list(_starts(tensor.elements, blocks_max))
    for number, start in enumerate(starts, 1):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        finite = sums.add(values(elements.read(start, count), tensor.dtype))
        cells.add(finite)
        _count_powers(powers, finite)
        counted_elements += count
        on_progress(number, len(starts))
    counts = tuple(
        (int(exponent) + _DEEPEST, int(powers[exponent])) for exponent in np.flatnonzero(powers)
    )
    return Histogram(tensor.elements, counted_elements, sums.result(), cells.result(), counts)


def alike(histograms: Sequence[Histogram]) -> tuple[HistogramBins, ...]:
    """Return the histograms of several tensors with bins of one width."""
    widest = max((stats.bars.exponent for stats in histograms if stats.bars.counts), default=0)
    return tuple(stats.bars.coarser(widest) for stats in histograms)


def _starts(elements: int, blocks_max: int) -> Iterator[int]:
    """Yield the starts of all blocks, or of ``blocks_max`` blocks from the first to the last."""
    blocks = -(-elements // BLOCK_ELEMENTS)
    if blocks <= blocks_max:
        yield from range(0, elements, BLOCK_ELEMENTS)
        return
    for nth in range(blocks_max):
        yield nth * (blocks - 1) // max(1, blocks_max - 1) * BLOCK_ELEMENTS


def _count_powers(powers: NDArray[np.int64], finite: NDArray[np.float64]) -> None:
    _, exponents = np.frexp(finite[finite != 0])
    powers += np.bincount(exponents - 1 - _DEEPEST, minlength=len(powers))


class HistogramAccumulator:
    """Accumulator of a histogram, whose result does not depend on the order of blocks.

    Args:
        is_whole: Whether the numbers are integers, which limits the bin width to 1 or more.
    """

    def __init__(self, *, is_whole: bool) -> None:
        self._least = 0 if is_whole else _DEEPEST
        self._low, self._high = math.inf, -math.inf
        self._exponent: int | None = None
        self._first, self._counts = 0, np.zeros(0, np.int64)

    def add(self, finite: NDArray[np.float64]) -> None:
        """Add finite numbers."""
        if not finite.size:
            return
        self._low = min(self._low, float(finite.min()))
        self._high = max(self._high, float(finite.max()))
        exponent = _exponent_of(self._low, self._high, self._least)
        if self._exponent is not None and exponent > self._exponent:
            grown = exponent - self._exponent
            self._first, self._counts = _merged(self._first, self._counts, grown)
        self._exponent = exponent
        cells = np.floor(np.ldexp(finite, -exponent)).astype(np.int64)
        # A negative number belongs below zero, even if its quotient underflows to zero.
        cells -= (finite < 0) & (cells == 0)
        first = int(cells.min())
        self._join(first, np.bincount(cells - first))

    def result(self) -> HistogramBins:
        """Return the counts."""
        return HistogramBins(self._exponent or 0, self._first, tuple(self._counts.tolist()))

    def _join(self, first: int, counts: NDArray[np.int64]) -> None:
        if not self._counts.size:
            self._first, self._counts = first, counts
            return
        low = min(first, self._first)
        high = max(first + len(counts), self._first + len(self._counts))
        joined = np.zeros(high - low, np.int64)
        for begin, counts_of_side in ((first, counts), (self._first, self._counts)):
            joined[begin - low : begin - low + len(counts_of_side)] += counts_of_side
        self._first, self._counts = low, joined


def _exponent_of(low: float, high: float, least: int) -> int:
    """Return the smallest exponent with at most ``CELLS_MAX`` bins between two numbers."""
    largest = max(abs(low), abs(high))
    if largest == 0:
        return least  # zero is on the edge of a bin of any width
    exponent = max(least, math.frexp(largest)[1] - _FINEST_BITS)
    while _cell(high, exponent) - _cell(low, exponent) >= CELLS_MAX:
        exponent += 1
    return exponent


def _cell(value: float, exponent: int) -> int:
    cell = math.floor(math.ldexp(value, -exponent))
    return -1 if value < 0 and cell == 0 else cell


def _merged(first: int, counts: NDArray[np.int64], bits: int) -> tuple[int, NDArray[np.int64]]:
    """Return bins that are ``2 ** bits`` times as wide."""
    numbers = (first + np.arange(len(counts), dtype=np.int64)) >> min(bits, _FAR_BITS)
    merged_counts = np.zeros(int(numbers[-1] - numbers[0]) + 1, np.int64)
    np.add.at(merged_counts, numbers - numbers[0], counts)
    return int(numbers[0]), merged_counts


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """Counts of NaN, infinite, negative and nonzero elements of a tensor.

    Attributes:
        nans: Number of NaN elements.
        infinite: Number of infinite elements.
        negative: Number of negative elements.
        nonzero: Number of elements that are not zero.
        first: Value of a tensor of one element.
        hole: Offset in the file and length of a hole, in bytes.
        top: Largest finite magnitude, without the values of masks.
        others: Mean of all other magnitudes.
        run: First element and length of a run of zeros that begins or ends at a page of the file.
    """

    nans: int = 0
    infinite: int = 0
    negative: int = 0
    nonzero: int = 0
    first: float = 0.0
    hole: tuple[int, int] | None = None
    top: float = 0.0
    others: float = 0.0
    run: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScannedTensor:
    """A tensor whose numbers were all read, with the counts."""

    tensor: Tensor
    counts: TensorCounts

    @property
    def name(self) -> str:
        """Its name."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements per axis."""
        return self.tensor.shape

    @property
    def is_zero(self) -> bool:
        """True if all numbers are zero."""
        return not self.counts.nonzero

    @property
    def place(self) -> str:
        """First file of the tensor."""
        return self.tensor.files[0] if self.tensor.files else "."
