"""NaN, infinite and huge numbers in weights: damage, or values that were saved on purpose.

A mask that is saved as a buffer has infinite numbers, and another buffer may be NaN until its first
use. No step trains such a tensor, so every tool resumes it unchanged. A trained weight that is NaN
stays NaN, so a checkpoint with such a weight is refused.

Without the model, the file of weights does not show which tensors are trained. The following facts
are evidence that a tensor is not trained:

* **Values of a mask.** A mask has only zeros and several times minus infinity.
* **No moments.** The optimizer has moments for each parameter that got a gradient. A comparison of
  names or shapes finds the tensors without moments. A frozen weight has no moments either, so
  missing moments excuse infinite numbers but not NaN.
* **Equal numbers in the nearest other steps.** In these steps, a buffer or a tensor without moments
  has NaN and infinite numbers at the same places. So the numbers were the same at these steps, and
  no resume changes them.

A finite number is huge if no training reaches its magnitude. Damage can hit many numbers of a
tensor, so the mean and even the median may be huge, too. For this reason the limit for parameters
is absolute. Huge numbers belong into a tensor in the following cases:

* **Values of a mask.** The largest number of a dtype is no huge number. A repeated negative number
  is a mask if the optimizer has no moments of the tensor, or only zeros at these places.
* **Constants of a buffer.** A buffer may have several huge numbers.
* **The nearest other steps** have huge numbers at the same places.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from resilient.diff.other_steps import steps_beside_alike
from resilient.diff.tensor_reader import BLOCK_ELEMENTS, Elements
from resilient.diff.tensor_stats import values
from resilient.layouts.model import MODEL, OPTIMIZER, Problem, Remedy, Unreadable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from resilient.diff.tensor_stats import TensorCounts
    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

SLOTS = ("exp_avg_sq", "exp_avg", "exp_inf", "momentum_buffer", "square_avg", "sum")
"""State in the shape of its parameter."""
_WORDS = {MODEL: "weights", OPTIMIZER: "optimizer's state"}
_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's normalization layers."""
_PARAMETERS = (".weight", ".bias")
"""Ends of the names of parameters in the modules of torch."""
_HUGE = 1e15
"""Magnitude that no trained weight and no moment of a gradient reaches."""
_SQUARES_APART = 1e24
"""Ratio of a square to the median of its tensor that no gradient causes."""
_LINEAR = {
    *("exp_avg", "exp_avg_slow", "exp_avg_fast", "exp_avg_diff", "exp_inf", "momentum_buffer"),
    *("ax", "grad_avg", "prev", "previous_grad", "neg_pre_grad", "z"),
}
"""State with the scale of a gradient or of a weight; other state may have the scale of a square."""
_MASKS = [float(np.finfo("f4").max), float(np.finfo("f8").max), 255 / 128 * 2.0**127]
"""Largest numbers of F32, F64 and BF16; masks contain the most negative number of a dtype."""
_MOMENTS_READ_MAX = 16
_EXPONENTS = 1 << 11
_EXPONENT_BIAS = 1023


def sizes_without_masks(numbers: Any) -> NDArray[np.float64]:
    """Return the finite magnitudes of numbers, without the largest numbers of the dtypes.

    Args:
        numbers: Numbers of any shape, in double precision.
    """
    sizes: NDArray[np.float64] = np.abs(numbers).ravel()
    if sizes.size and not sizes.max() < min(_MASKS):
        sizes = sizes[np.isfinite(sizes) & ~np.isin(sizes, _MASKS)]
    return sizes


@dataclass(frozen=True, slots=True)
class _HugeNumbers:
    """Huge numbers of a tensor.

    Attributes:
        count: Number of them.
        median: Median of all magnitudes that are not zero, up to a factor of 2.
        is_mask: Whether they are one negative number that occurs several times.
    """

    count: int
    median: float
    is_mask: bool


class UnusualNumbers:
    """Judge of the NaN, infinite and huge numbers of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        contents: Its contents.
        buffers: Names of weights that are known not to be parameters.
    """

    def __init__(
        self,
        folder: Folder,
        listing: DirectoryListing,
        contents: Contents,
        buffers: Collection[str],
    ) -> None:
        self._folder, self._listing = folder, listing
        self._contents, self._buffers = contents, buffers

    def problem(self, tensor: Tensor, counts: TensorCounts) -> Problem | None:
        """Return the problem of a tensor with such numbers; None if they belong there.

        Args:
            tensor: A weight or a part of the optimizer's state.
            counts: Counts of its numbers.

        Raises:
            StoreError: A file could not be read.
        """
        if tensor.part == MODEL and self._is_intended(tensor, counts):
            return None
        problem_text = (
            f"`{tensor.name[:80]}` has {counts.nans} NaN and {counts.infinite} infinite of "
            f"{tensor.elements}"
        )
        # Every tool resumes a buffer unchanged: no step trains it, and NaN may be its first value.
        is_buffer = tensor.name in self._buffers or tensor.name.endswith(_STATISTICS)
        is_fatal = bool(counts.nans) and not (tensor.part == MODEL and is_buffer)
        is_note = tensor.part == MODEL and not counts.nans and self._has_no_moments(tensor)
        loses = "" if is_fatal or is_note else f"finite numbers in the {_WORDS[tensor.part]}"
        if is_note:
            problem_text += ", but the optimizer does not train it: it may be a mask"
        return Problem(tensor.files[0], problem_text, loses, is_fatal=is_fatal, cure=Remedy.EARLIER)

    def _is_intended(self, tensor: Tensor, counts: TensorCounts) -> bool:
        """Return True if a weight's numbers are those of a mask, or of the steps beside it."""
        # One infinite number in a bias of zeros is damage.
        numbers = {counts.negative, counts.nonzero, counts.infinite}
        is_mask = numbers == {counts.infinite} and 1 < counts.infinite < tensor.elements
        if not counts.nans and (is_mask or tensor.name in self._buffers):
            return True
        is_untrained = (
            tensor.name in self._buffers
            or tensor.name.endswith(_STATISTICS)
            or self._has_no_moments(tensor)
        )
        return is_untrained and self._is_same_beside(tensor)

    def _has_no_moments(self, tensor: Tensor) -> bool:
        """Return True if the optimizer has moments, but fewer than weights of this shape."""
        names, shapes = self._moments
        if not shapes or tensor.name.removeprefix("model.") in names:
            return False
        return self._weights[tensor.shape] > shapes[tensor.shape]

    @cached_property
    def _weights(self) -> Counter[tuple[int, ...]]:
        return Counter(tensor.shape for tensor in self._contents.tensors if tensor.part == MODEL)

    @cached_property
    def _moments(self) -> tuple[set[str], Counter[tuple[int, ...]]]:
        """Names of the parameters with moments, and the number of moments of each shape.

        Both are empty if the optimizer stores the moments of a parameter in another shape.
        """
        owners: set[str] = set()
        shape_by_owner: dict[str, tuple[int, ...]] = {}
        for tensor in self._contents.tensors:
            if tensor.part != OPTIMIZER:
                continue
            owner, _, slot = tensor.name.rpartition(".")
            owners.add(owner)
            if slot in SLOTS:
                shape_by_owner.setdefault(owner, tensor.shape)
        if owners != shape_by_owner.keys():
            return set(), Counter()
        names = {owner.partition("state.")[2].removeprefix("model.") for owner in owners}
        return names, Counter(shape_by_owner.values())

    def huge_problem(self, tensor: Tensor, counts: TensorCounts) -> Problem | None:
        """Return the problem of a tensor with huge numbers; None if they belong there.

        Args:
            tensor: A weight or a part of the optimizer's state.
            counts: Counts of its numbers.

        Raises:
            StoreError: A file could not be read.
        """
        if counts.top <= _HUGE:
            return None
        huge = self._huge_numbers(tensor)
        if tensor.part == OPTIMIZER:
            is_damage = _is_huge_moment(tensor, counts, huge)
            reason = "beyond the scale of any gradient: the next updates have another size"
        else:
            is_damage = self._is_huge_weight(tensor, counts, huge)
            reason = "beyond the scale of any weight: a step spoils all weights"
        if not is_damage:
            return None
        if huge.count > 1:
            text = f"{huge.count} of {tensor.elements} numbers of up to {counts.top:.0e}"
        elif tensor.elements > 1 and huge.median:
            ratio = counts.top / huge.median
            text = f"a value of {counts.top:.0e}, {ratio:.0e} times the median of its others"
        else:
            text = f"a value of {counts.top:.0e}"
        problem_text = f"`{tensor.name[:80]}` has {text}, {reason}"
        return Problem(tensor.files[0], problem_text, is_fatal=True, cure=Remedy.COPY)

    def _is_huge_weight(self, tensor: Tensor, counts: TensorCounts, huge: _HugeNumbers) -> bool:
        """Return True if the huge numbers of a weight are damage."""
        is_parameter = (
            tensor.name not in self._buffers
            and not tensor.name.endswith(_STATISTICS)
            and (tensor.name.endswith(_PARAMETERS) or self._has_moments(tensor))
        )
        if self._is_same_beside(tensor, _HUGE, has_same_numbers=not is_parameter):
            return False
        if is_parameter:
            return not (huge.is_mask and self._has_no_gradient(tensor))
        is_outlier = tensor.elements > 1 and counts.top > _HUGE * counts.others
        return is_outlier or (huge.count < tensor.elements and self._is_older_usual(tensor))

    def _has_moments(self, tensor: Tensor) -> bool:
        """Return True if the optimizer has moments of all weights of this shape."""
        return bool(self._moments[1]) and not self._has_no_moments(tensor)

    def _has_no_gradient(self, tensor: Tensor) -> bool:
        """Return True if a tensor never had a gradient at the places of its huge numbers."""
        if self._has_no_moments(tensor):
            return True
        moments = [
            moment
            for moment in self._contents.tensors
            if moment.part == OPTIMIZER
            and moment.shape == tensor.shape
            and moment.name.rpartition(".")[2] in SLOTS
        ]
        return any(self._is_zero_at_huge(tensor, moment) for moment in moments[:_MOMENTS_READ_MAX])

    def _is_zero_at_huge(self, tensor: Tensor, moment: Tensor) -> bool:
        """Return True if a moment is zero at the places of a tensor's huge numbers."""
        try:
            return all(
                not np.any(state[_huge_places(numbers)])
                for numbers, state in zip(
                    _blocks(self._folder, self._listing, tensor),
                    _blocks(self._folder, self._listing, moment),
                    strict=True,
                )
            )
        except Unreadable:
            return False

    def _is_older_usual(self, tensor: Tensor) -> bool:
        """Return True if the same tensor of an older step has no huge number."""
        older_steps = [place for place in self._tensors_beside(tensor) if place[-1]]
        try:
            return any(
                not any(np.any(_huge_places(numbers)) for numbers in _blocks(*place[:-1]))
                for place in older_steps
            )
        except Unreadable:
            return False

    def _huge_numbers(self, tensor: Tensor) -> _HugeNumbers:
        """Return the huge numbers of a tensor, in bounded memory."""
        exponents: NDArray[np.int64] = np.zeros(_EXPONENTS, np.int64)
        count, lowest, highest = 0, np.inf, -np.inf
        for numbers in _blocks(self._folder, self._listing, tensor):
            sizes = sizes_without_masks(numbers)
            bits: NDArray[np.int64] = sizes[sizes > 0].view(np.int64) >> 52
            exponents += np.bincount(bits, minlength=_EXPONENTS)
            huge = numbers[_huge_places(numbers)]
            if huge.size:
                count += huge.size
                lowest, highest = min(lowest, huge.min()), max(highest, huge.max())
        middle = int(np.searchsorted(np.cumsum(exponents), (exponents.sum() + 1) // 2))
        median = 2.0 ** (middle - _EXPONENT_BIAS) if exponents.any() else 0.0
        return _HugeNumbers(count, median, count > 1 and lowest == highest < 0)

    def _is_same_beside(
        self, tensor: Tensor, limit: float = np.inf, *, has_same_numbers: bool = True
    ) -> bool:
        """Return True if the steps beside have unusual numbers at the same places of a tensor.

        Args:
            tensor: A weight.
            limit: Magnitude from which on a number is unusual.
            has_same_numbers: Whether these numbers must be equal, too.
        """
        beside = self._tensors_beside(tensor)
        return bool(beside) and all(
            self._is_same(tensor, place, limit, has_same_numbers=has_same_numbers)
            for place in beside
        )

    def _tensors_beside(
        self, tensor: Tensor
    ) -> list[tuple[Folder, DirectoryListing, Tensor, bool]]:
        """Return the same weight of the nearest other steps, and whether the step is older."""
        return [
            (folder, listing, other, (contents.step or 0) < (self._contents.step or 0))
            for folder, listing, contents in self._beside
            for other in contents.tensors
            if (other.part, other.name, other.shape) == (MODEL, tensor.name, tensor.shape)
        ]

    @cached_property
    def _beside(self) -> list[tuple[Folder, DirectoryListing, Contents]]:
        return list(steps_beside_alike(self._folder, self._contents))

    def _is_same(
        self,
        tensor: Tensor,
        place: tuple[Folder, DirectoryListing, Tensor, bool],
        limit: float,
        *,
        has_same_numbers: bool,
    ) -> bool:
        folder, listing, other, _ = place
        try:
            for ours, others in zip(
                _blocks(self._folder, self._listing, tensor),
                _blocks(folder, listing, other),
                strict=True,
            ):
                odd = ~(np.abs(ours) < limit)
                if not np.array_equal(odd, ~(np.abs(others) < limit)) or (
                    has_same_numbers and not np.array_equal(ours[odd], others[odd], equal_nan=True)
                ):
                    return False
        except Unreadable:
            return False
        return True


def _blocks(
    folder: Folder, listing: DirectoryListing, tensor: Tensor
) -> Iterator[NDArray[np.float64]]:
    """Yield the numbers of a tensor in double precision, block by block.

    Raises:
        Unreadable: A file is damaged or ends too early.
        StoreError: A file could not be read.
    """
    elements = Elements(folder, listing, tensor)
    for start in range(0, tensor.elements, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, tensor.elements - start)
        yield values(elements.read(start, count), tensor.dtype)


def _huge_places(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a flag for each number: True if it is huge, but finite and no value of a mask."""
    sizes = np.abs(numbers)
    flags: NDArray[np.bool_] = (sizes > _HUGE) & np.isfinite(sizes) & ~np.isin(sizes, _MASKS)
    return flags


def _is_huge_moment(tensor: Tensor, counts: TensorCounts, huge: _HugeNumbers) -> bool:
    """Return True if the huge numbers of the optimizer's state are damage."""
    slot = tensor.name.rpartition(".")[2]
    if tensor.elements == 1 and slot not in (*SLOTS, *_LINEAR):
        return False  # a count, or a constant of the optimizer
    is_linear = slot in _LINEAR
    is_outlier = tensor.elements > 1 and counts.top > _HUGE * counts.others
    return (
        is_linear
        or is_outlier
        or counts.top > _HUGE * _HUGE
        or counts.top > _SQUARES_APART * huge.median
    )
