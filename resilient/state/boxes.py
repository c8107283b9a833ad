"""Boxes of tensors together with the memory that holds them here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from resilient.format.dtypes import ITEM_BYTES
from resilient.format.extents import Place, stored_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.format.manifest import TensorEntry
    from resilient.format.regions import Region


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """A box of a global tensor and the memory that holds it here.

    Attributes:
        region: where it lies in the global tensor.
        data: the same elements, as a view of this rank's memory.
    """

    region: Region
    data: torch.Tensor

    def part(self, region: Region) -> torch.Tensor:
        """Return the memory of a box inside this one."""
        data = self.data
        for axis, count in enumerate(region.lengths):
            data = data.narrow(axis, region.offsets[axis] - self.region.offsets[axis], count)
        return data


def places_in(entry: TensorEntry, boxes: Iterable[Box]) -> list[tuple[str, Place]]:
    """Return by file where the bytes of a stored tensor go, if all lie in memory as in the files.

    Args:
        entry: where its regions lie.
        boxes: what is wanted of it, in host memory.

    Returns:
        Nothing if some of it must be read elsewhere and copied.
    """
    found = []
    for box in boxes:
        for file, start, length, data in _spans(entry, box):
            if length != data.nbytes or not data.is_contiguous():
                return []
            found.append((file, Place(start, _bytes_of(data))))
    return found


def _spans(entry: TensorEntry, box: Box) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    for stored in entry.regions:
        for part, start, length in stored_spans(stored, box.region, ITEM_BYTES[entry.dtype]):
            yield stored.file, start, length, box.part(part)


def _bytes_of(data: torch.Tensor) -> memoryview:
    return data.detach().reshape(-1).view(torch.uint8).numpy().data
