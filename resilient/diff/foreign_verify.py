"""Verification of the bytes of another tool's checkpoint: checksums, implausible numbers, holes.

After a power loss, a file can have its full length but not all of its bytes. The missing bytes form
a hole, which consists of whole pages of zeros. A hole begins or ends at a page boundary of the
file. In contrast, rows of a tensor that are zero on purpose begin and end at row boundaries. A row
begins at a page boundary only by chance.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.diff.non_finite import UnusualNumbers, sizes_without_masks
from resilient.diff.other_steps import odd_update_counts, remaining_problems, stale_copies
from resilient.diff.tensor_reader import BLOCK_ELEMENTS, Elements, ReadAhead
from resilient.diff.tensor_stats import (
    ScannedTensor,
    TensorCounts,
    is_complex,
    is_float,
    values,
)
from resilient.diff.zero_values import HOLE, odd_zeros
from resilient.layouts.checksums import BEHIND, check_bytes
from resilient.layouts.detect import witnesses_of
from resilient.layouts.field_types import miscounted, number_fault
from resilient.layouts.majorities import PRECISION, wider_copies
from resilient.layouts.model import (
    ITEM_BITS,
    MODEL,
    OPTIMIZER,
    Problem,
    Remedy,
    StorageFormat,
    Unreadable,
)
from resilient.layouts.security_scan import Risk, scan
from resilient.layouts.single_file import ALONE
from resilient.layouts.weights import SAFE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

PAGE_BYTES = 4096
_PARTS = (1, 2, 3, 4, 6, 8)
"""Numbers of equal parts into which a row may be split on purpose, as for queries and keys."""


class ZeroPageScan:
    """Search for a hole in one tensor whose bytes are in one piece of a file.

    Args:
        start: Offset of the tensor in the file, in bytes.
        item_bytes: Bytes per element.
        row: Elements per row.

    Attributes:
        run: First element and length of a run of zeros that begins or ends at a page of the file;
            None without one. Rows that are zero on purpose may end at a page too.
    """

    def __init__(self, start: int, item_bytes: int, row: int) -> None:
        self._start = start
        self._item_bytes = item_bytes
        self._row = max(row, 1)
        self._first: tuple[int, int] | None = None
        self.run: tuple[int, int] | None = None
        self._is_usual = False
        self._columns: set[int] = set()

    @property
    def hole(self) -> tuple[int, int] | None:
        """Offset in the file and length of the hole; None if zeros also cut rows elsewhere."""
        return None if self._is_usual else self._first

    def look(self, first: int, is_zero: NDArray[np.bool_]) -> None:
        """Scan a block of elements.

        Args:
            first: Index in the tensor of the first element of the block.
            is_zero: Flag for each element.
        """
        elements_min = PAGE_BYTES // self._item_bytes
        if np.count_nonzero(is_zero) < elements_min:
            return
        edges: NDArray[Any] = np.flatnonzero(np.diff(is_zero, prepend=False, append=False))
        pairs = edges.reshape(-1, 2)
        for begin, end in pairs[pairs[:, 1] - pairs[:, 0] >= elements_min].tolist():
            # A run of zeros that continues beyond the block has no edge at the end of the block.
            inner_edges = [place for place in (begin, end) if 0 < place < is_zero.size]
            if self.run is None and any(self._is_at_page(first + at) for at in inner_edges):
                self.run = (first + begin, end - begin)
            cuts = [first + place for place in inner_edges if self._cuts_a_row(first + place)]
            if any(map(self._is_at_page, cuts)):
                at = self._start + (first + begin) * self._item_bytes
                self._first = self._first or (at, (end - begin) * self._item_bytes)
            elif cuts:
                self._is_usual = True
            # Zeros that begin at the same column in several rows are intended.
            columns = {boundary % self._row for boundary in cuts}
            self._is_usual |= not columns.isdisjoint(self._columns)
            self._columns |= columns

    def _cuts_a_row(self, element: int) -> bool:
        """Return True if an element is inside a row, but not at the start of an equal part."""
        column = element % self._row
        return all(column * parts % self._row for parts in _PARTS)

    def _is_at_page(self, element: int) -> bool:
        """Return True if a page of the file begins in an element or in the previous element."""
        page_offset = (self._start + element * self._item_bytes) % PAGE_BYTES
        return min(page_offset, PAGE_BYTES - page_offset) < self._item_bytes


NAMED_MAX = 16
"""Largest number of tensors that are named."""


def verify_foreign(
    folder: Folder,
    listing: DirectoryListing,
    contents: Contents,
    buffers: Collection[str] = (),
) -> tuple[Problem, ...]:
    """Return the problems of the bytes; ``contents`` has the problems of the headers.

    The function reads all checksums of torch files and of slices, and all numbers of weights and of
    the optimizer. It reports NaN, infinite numbers, negative second moments, and numbers far beyond
    the scale of their tensor. It also reports a file of zeros, a page of zeros that cuts a row, and
    zeros that no training leaves (:mod:`resilient.diff.zero_values`). The last check finds files
    that equal the files of another step beside the checkpoint.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        contents: Result of :func:`resilient.layouts.detect.read_layout`.
        buffers: Names of weights that are known not to be parameters.

    Raises:
        StoreError: A file could not be read.
    """
    findings = [*check_bytes(folder, listing), *_dangers(folder, listing)]
    # A missing optimizer is no damage of the weights.
    fatal = [problem for problem in contents.problems if problem.is_fatal and problem.what != ALONE]
    damage_problems = [*(problem for problem in findings if problem.what != BEHIND), *fatal]
    damaged_places = {problem.place for problem in damage_problems}
    read_ahead = ReadAhead(folder, listing)
    # Numbers of a damaged file do not show what was saved.
    tensors = [
        tensor
        for tensor in contents.tensors
        if tensor.part in (MODEL, OPTIMIZER) and not damaged_places & set(tensor.files)
    ]
    stale = stale_copies(folder, listing, contents)
    judge = UnusualNumbers(folder, listing, contents, buffers)
    byte_problems = (
        *findings,
        *_odd_numbers(read_ahead, listing, contents, tensors, judge),
        *_lossy_casts(read_ahead, listing, contents),
        *stale,
    )
    known = {(problem.place, problem.what) for problem in contents.problems}
    problems = remaining_problems(folder, listing, (*contents.problems, *byte_problems))
    return tuple(problem for problem in problems if (problem.place, problem.what) not in known)


RISKS = "resilient ckpt scan {path}"
"""Remedy for a file that runs code in its usual loader."""


def _dangers(folder: Folder, listing: DirectoryListing) -> Iterator[Problem]:
    """Yield problems of content that runs code or leads out of the folder at a usual load."""
    for finding in scan(folder, listing):
        if finding.risk is Risk.DANGER:
            is_fatal = finding.file not in listing.outside
            yield Problem(finding.file, finding.what, is_fatal=is_fatal, help=RISKS)


def _odd_numbers(
    near: Folder,
    listing: DirectoryListing,
    contents: Contents,
    tensors: list[Tensor],
    judge: UnusualNumbers,
) -> Iterator[Problem]:
    spared: set[str] = set()
    scans: list[ScannedTensor] = []
    problems = list(islice(_each(near, listing, tensors, spared, scans, judge), NAMED_MAX))
    yield from problems
    if len(problems) == NAMED_MAX:
        return  # the scan did not cover all tensors
    weights = {name: None for tensor in tensors if tensor.part == MODEL for name in tensor.files}
    zero_files = [
        name
        for name in weights
        if name not in spared and listing.sizes.get(name, 0) >= _ZEROS_BYTES
    ]
    for name in zero_files:
        yield Problem(name, ZEROS, is_fatal=True, cure=Remedy.COPY)
    known = [scan for scan in scans if scan.place not in zero_files]
    yield from odd_update_counts(near, contents, known)
    yield from odd_zeros(near, listing, contents, known)


def _each(
    near: Folder,
    listing: DirectoryListing,
    tensors: list[Tensor],
    spared: set[str],
    scans: list[ScannedTensor],
    judge: UnusualNumbers,
) -> Iterator[Problem]:
    """Yield the problems of each tensor, and collect files with nonzero numbers and all scans."""
    for tensor in tensors:
        if not (is_float(tensor.dtype) or is_complex(tensor.dtype)) or not tensor.pieces:
            spared.update(tensor.files)  # the scan did not cover this tensor
            continue
        try:
            counts = _counted(near, listing, tensor)
        except Unreadable as error:
            spared.update(tensor.files)
            yield Problem(
                tensor.files[0],
                f"`{tensor.name[:80]}`: {error}",
                is_fatal=True,
                tensor=tensor.name,
            )
            continue
        scans.append(ScannedTensor(tensor, counts))
        if counts.nonzero:
            # The scan did not count the pieces of a tensor in several files separately, so all
            # pass.
            spared.update(tensor.files)
        is_finite = not (counts.nans or counts.infinite)
        problem = (
            _odd(tensor, counts, judge)
            if is_finite
            else judge.problem(tensor, counts) or judge.huge_problem(tensor, counts)
        )
        if problem is not None:
            yield replace(problem, tensor=tensor.name)


def _odd(tensor: Tensor, counts: TensorCounts, judge: UnusualNumbers) -> Problem | None:
    """Return the problem of a tensor's finite numbers, if any."""
    return (
        _odd_count(tensor, counts)
        or _negative_squares(tensor, counts)
        or judge.huge_problem(tensor, counts)
        or _hole(tensor, counts)
    )


def _odd_count(tensor: Tensor, counts: TensorCounts) -> Problem | None:
    """Return the problem of a count of updates that no optimizer makes, if any."""
    is_count = tensor.part == OPTIMIZER and tensor.name.endswith(".step") and tensor.elements == 1
    if is_count and (fault := number_fault(counts.first)):
        problem_text = miscounted(tensor.name.removesuffix(".step"), fault)
        return Problem(tensor.files[0], problem_text, is_fatal=True, cure=Remedy.COPY)
    return None


def _negative_squares(tensor: Tensor, counts: TensorCounts) -> Problem | None:
    """Return the problem of moments that hold squares but have negative numbers, if any."""
    if counts.negative and tensor.part == OPTIMIZER and tensor.name.endswith(_SQUARES):
        problem_text = (
            f"`{tensor.name[:80]}` has {counts.negative} negative of {tensor.elements}, but holds "
            "squares"
        )
        return Problem(tensor.files[0], problem_text, is_fatal=True)
    return None


def _hole(tensor: Tensor, counts: TensorCounts) -> Problem | None:
    """Return the problem of a hole of zeros, if any."""
    if counts.hole and counts.nonzero:
        at, length = counts.hole
        problem_text = (
            f"`{tensor.name[:80]}` has {length} bytes of zeros from byte {at} of the file on, "
            "whole pages: "
        )
        return Problem(tensor.files[0], problem_text + HOLE, is_fatal=True, cure=Remedy.COPY)
    return None


_SQUARES = ("exp_avg_sq", "square_avg")
"""Moments of which an optimizer takes the root; the root of a negative number is NaN."""
ZEROS = "every number in it is zero, as after a loss of power"
_ZEROS_BYTES = 4096


def _counted(near: Folder, listing: DirectoryListing, tensor: Tensor) -> TensorCounts:
    """Count NaN, infinite, negative and nonzero elements of a tensor."""
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
    hole, run = (pages.hole, pages.run) if pages else (None, None)
    top, mean = scale.result()
    return TensorCounts(nans, infinite, negative, nonzero, first, hole, top, mean, run)


class _Scale:
    """Largest magnitude of some numbers, and the mean of all others."""

    def __init__(self) -> None:
        self._top, self._sum, self._count = 0.0, 0.0, 0

    def look(self, numbers: Any) -> None:
        """Add numbers."""
        sizes = sizes_without_masks(numbers)
        if not sizes.size:
            return
        top = float(sizes.max())
        self._sum += float(sizes.sum(dtype=np.float64)) - top + min(self._top, top)
        self._top = max(self._top, top)
        self._count += sizes.size

    def result(self) -> tuple[float, float]:
        """Return the largest magnitude and the mean of the others; 0 if there are no others."""
        return self._top, self._sum / (self._count - 1) if self._count > 1 else 0.0


def _pages(tensor: Tensor) -> ZeroPageScan | None:
    """Return a scan for holes if the tensor is in one piece of a file without checksums."""
    piece = tensor.pieces[0]
    is_plain = (
        piece.form is StorageFormat.BYTES and piece.file.endswith(SAFE) and not tensor.pieces[1:]
    )
    if not is_plain or is_complex(tensor.dtype):
        return None
    row = tensor.shape[-1] if tensor.shape[1:] else tensor.elements
    return ZeroPageScan(piece.start, ITEM_BITS[tensor.dtype] // 8, row)


_BF16_DIGITS = 0xFFFF
"""Mask of the bits of F32 that BF16 does not have."""


def _lossy_casts(
    folder: Folder, listing: DirectoryListing, contents: Contents
) -> Iterator[Problem]:
    """Yield the problem of weights with digits that the dtype of most files does not have.

    A copy of F32 weights in F64 loses nothing: a resume casts it to F32.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        contents: Its contents.

    Raises:
        StoreError: A file could not be read.
    """
    witnesses = witnesses_of(folder, listing, contents)
    wide = wider_copies(contents.tensors, witnesses) if witnesses else []
    rounded = [
        (weight, dtype) for weight, dtype in wide if not _fits(folder, listing, weight, dtype)
    ]
    if rounded:
        weight, dtype = rounded[0]
        problem_text = (
            f"{len(rounded)} of its weights have digits that {dtype} does not have, including "
            f"`{weight.name[:80]}`"
        )
        place = weight.files[0] if weight.files else "."
        yield Problem(place, problem_text, PRECISION, cure=Remedy.COPY)


def _fits(folder: Folder, listing: DirectoryListing, tensor: Tensor, dtype: str) -> bool:
    """Return True if a cast to a narrower dtype rounds no number, or the tensor is unreadable."""
    try:
        elements = Elements(folder, listing, tensor)
        for at in range(0, tensor.elements, BLOCK_ELEMENTS):
            data = elements.read(at, min(BLOCK_ELEMENTS, tensor.elements - at))
            if not _is_exact(values(data, tensor.dtype), dtype):
                return False
    except Unreadable:
        return True
    return True


def _is_exact(numbers: NDArray[np.float64], dtype: str) -> bool:
    with np.errstate(over="ignore"):
        narrow: NDArray[Any] = numbers.astype(np.float16 if dtype == "F16" else np.float32)
    if dtype == "BF16" and np.any(narrow.view(np.uint32) & _BF16_DIGITS):
        return False
    return bool(np.array_equal(narrow.astype(np.float64), numbers, equal_nan=True))
