"""NaN and infinite numbers in weights: damage, or values that were saved on purpose.

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
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from resilient.diff.other_steps import steps_beside_alike
from resilient.diff.tensor_reader import BLOCK_ELEMENTS, Elements
from resilient.diff.tensor_stats import values
from resilient.layouts.model import MODEL, OPTIMIZER, Problem, Remedy, Unreadable

if TYPE_CHECKING:
    from collections.abc import Collection

    from resilient.diff.tensor_stats import TensorCounts
    from resilient.layouts.model import Contents, Tensor
    from resilient.storage.folder import DirectoryListing, Folder

SLOTS = ("exp_avg_sq", "exp_avg", "exp_inf", "momentum_buffer", "square_avg", "sum")
"""State in the shape of its parameter."""
_WORDS = {MODEL: "weights", OPTIMIZER: "optimizer's state"}
_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's normalization layers."""


class NonFiniteNumbers:
    """Judge of the NaN and infinite numbers of a checkpoint.

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

    def _is_same_beside(self, tensor: Tensor) -> bool:
        """Return True if the steps beside have such numbers at the same places of a tensor."""
        beside = [
            (folder, listing, other)
            for folder, listing, contents in self._beside
            for other in contents.tensors
            if (other.part, other.name, other.shape) == (MODEL, tensor.name, tensor.shape)
        ]
        return bool(beside) and all(self._is_same(tensor, *other) for other in beside)

    @cached_property
    def _beside(self) -> list[tuple[Folder, DirectoryListing, Contents]]:
        return list(steps_beside_alike(self._folder, self._contents))

    def _is_same(
        self, tensor: Tensor, folder: Folder, listing: DirectoryListing, other: Tensor
    ) -> bool:
        try:
            own = Elements(self._folder, self._listing, tensor)
            theirs = Elements(folder, listing, other)
            for start in range(0, tensor.elements, BLOCK_ELEMENTS):
                count = min(BLOCK_ELEMENTS, tensor.elements - start)
                ours = values(own.read(start, count), tensor.dtype)
                others = values(theirs.read(start, count), other.dtype)
                odd = ~np.isfinite(ours)
                if not np.array_equal(odd, ~np.isfinite(others)) or not np.array_equal(
                    ours[odd], others[odd], equal_nan=True
                ):
                    return False
        except Unreadable:
            return False
        return True
