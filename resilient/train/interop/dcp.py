"""torch's distributed checkpoints (DCP): a folder of slices and an index of what they hold.

The index is read by :mod:`resilient.layouts.distributed`, which executes nothing.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, StoreError
from resilient.format.regions import covers
from resilient.layouts.distributed import read_index
from resilient.layouts.values import ITEM_BITS, Unreadable
from resilient.showing import quoted
from resilient.state.dtypes import TORCH_DTYPES
from resilient.train.interop.archives import load_torch

if TYPE_CHECKING:
    from resilient.layouts.distributed import Index, Slice
    from resilient.layouts.values import Tensor
    from resilient.train.interop.source_folder import SourceFolder


def read_dcp(source: SourceFolder, name: str) -> dict[tuple[Any, ...], Any]:
    """Return everything that a distributed checkpoint holds, by path, tensors whole and on the CPU.

    Args:
        source: The checkpoint folder.
        name: The folder of the distributed checkpoint in it.

    Raises:
        IntegrityError: A file is missing or damaged, or a tensor is not there as a whole.
        IncompatibleCheckpoint: Slices were transformed, or the index has no paths.
    """
    return _Reader(source, name).read()


class _Reader:
    """Reads one distributed checkpoint.

    Args:
        source: The checkpoint folder.
        name: The folder in it.
    """

    def __init__(self, source: SourceFolder, name: str) -> None:
        self._source, self._place = source, source.path / name
        try:
            self._index: Index = read_index(source.folder, source.listing, f"{name}/")
        except (Unreadable, StoreError) as error:
            raise self._damaged(f"its index cannot be read: {error}") from error

    def read(self) -> dict[tuple[Any, ...], Any]:
        """Return all values by their paths."""
        paths = self._index.paths
        tensors = {one.name: one for one in self._index.tensors}
        names = [*tensors, *self._index.values]
        lost = next((one for one in names if one not in paths), "")
        if lost or not paths:
            raise IncompatibleCheckpoint(
                f"`{self._place}` has no path for `{lost[:80]}`: torch's own planner did not save "
                "it",
                hint="save it once with torch.distributed.checkpoint and its default planner",
            )
        return {
            paths[one]: self._tensor(tensors[one]) if one in tensors else self._value(one)
            for one in names
        }

    def _value(self, name: str) -> Any:
        """Return a value that is no tensor."""
        found = self._index.slices.get(name, ())
        if len(found) != 1:
            raise self._damaged(f"the index does not say where `{name[:80]}` is")
        return self._load(name, found[0])

    def _tensor(self, told: Tensor) -> torch.Tensor:
        """Return a tensor put together of its slices."""
        slices = self._index.slices.get(told.name, ())
        self._require_plain(slices)
        item_bytes = ITEM_BITS.get(told.dtype, 0) // 8
        if told.dtype not in TORCH_DTYPES:
            raise self._damaged(f"`{told.name[:80]}` has a dtype that is not known")
        regions = [one.region for one in told.pieces]
        is_whole = len(regions) == len(slices) and covers(told.shape, regions)
        if told.elements and not is_whole:
            raise self._damaged(f"`{told.name[:80]}` is not there as a whole")
        # An index may claim any shape: no memory is taken for bytes that no file has.
        if any(one.region.size * item_bytes > one.size_bytes for one in told.pieces):
            raise self._damaged(f"`{told.name[:80]}` has more elements than its files have bytes")
        whole = torch.empty(told.shape, dtype=TORCH_DTYPES[told.dtype])
        for region, place in zip(regions, slices, strict=True):
            data = self._load(told.name, place)
            if not isinstance(data, torch.Tensor) or tuple(data.shape) != region.lengths:
                raise self._damaged(f"a slice of `{told.name[:80]}` has not the shape of the index")
            spans = zip(region.offsets, region.lengths, strict=True)
            whole[tuple(slice(start, start + count) for start, count in spans)] = data
        return whole

    def _load(self, name: str, place: Slice) -> Any:
        """Return what lies in one slice of a file."""
        self._require_plain((place,))
        data = self._source.read_range(place.file, place.start, place.size_bytes)
        return load_torch(io.BytesIO(data), f"{self._source.path / place.file}, {name[:80]}")

    def _require_plain(self, slices: tuple[Slice, ...]) -> None:
        if not all(one.is_plain for one in slices):
            raise IncompatibleCheckpoint(
                f"`{self._place}` was saved through an extension of torch's storage writer, which "
                "no import undoes",
                hint="save it once without extensions of the storage writer",
            )

    def _damaged(self, trouble: str) -> IntegrityError:
        return IntegrityError(
            f"`{self._place}` is damaged: {trouble}",
            key=str(self._place),
            hint=f"resilient ckpt verify {quoted(str(self._source.path))}",
        )
