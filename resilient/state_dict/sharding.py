"""Local regions of sharded tensors, and the tensor class :class:`FlatShard`.

Source of the arithmetic: ``torch.distributed.tensor`` (2.13). Placements are applied from the first
mesh dimension to the last. ``Shard`` cuts the remaining axis as ``torch.chunk`` does, so the last
ranks may have fewer elements or none. ``_StridedShard`` (FSDP over a tensor-parallel model) first
cuts the axis into ``split_factor`` pieces and takes the same chunk of each piece. A rank may
therefore have several separate runs of indices of an axis. ``tests/property/test_placement.py``
compares this arithmetic with torch.

A :class:`FlatShard` describes a run of consecutive elements of a tensor in row-major order. Only
one rank stores these elements. As in ZeRO, the run may begin at any element.

The functions import ``torch.distributed.tensor`` when needed. This import takes longer than the
import of this library, and most runs have no sharded tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from resilient.errors import UnsavableState
from resilient.format.partial_read import ReadTarget, stored_spans
from resilient.format.regions import ITEM_BYTES, Region, flat_regions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from resilient.format.manifest import TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """A box of a global tensor and its local memory.

    Attributes:
        region: Box in the global tensor.
        data: The same elements, as a view of this rank's memory.
    """

    region: Region
    data: torch.Tensor

    def part(self, region: Region) -> torch.Tensor:
        """Return the memory of a box inside this one."""
        data = self.data
        for axis, count in enumerate(region.lengths):
            data = data.narrow(axis, region.offsets[axis] - self.region.offsets[axis], count)
        return data


def read_targets(entry: TensorEntry, boxes: Iterable[LocalShard]) -> list[tuple[str, ReadTarget]]:
    """Return the read targets by file, if memory and files have the same layout.

    Args:
        entry: Manifest entry with the places of the regions.
        boxes: Wanted boxes, in host memory.

    Returns:
        An empty list if some bytes must be read into other memory and copied.
    """
    targets = []
    for box in boxes:
        for file, start, length, data in _spans(entry, box):
            if length != data.nbytes or not data.is_contiguous():
                return []
            targets.append((file, ReadTarget(start, _bytes_of(data))))
    return targets


def _spans(entry: TensorEntry, box: LocalShard) -> Iterator[tuple[str, int, int, torch.Tensor]]:
    for stored_region in entry.regions:
        for part, start, length in stored_spans(stored_region, box.region, ITEM_BYTES[entry.dtype]):
            yield stored_region.file, start, length, box.part(part)


def _bytes_of(data: torch.Tensor) -> memoryview:
    return data.detach().reshape(-1).view(torch.uint8).numpy().data


class FlatShard(torch.Tensor):
    """A global tensor of which this rank has one run of elements in row-major order.

    A FlatShard has the shape and dtype of the whole tensor. It can be saved and loaded, but not
    used in computations.

    Attributes:
        start: First element of the run in the whole tensor.
        memory: The run, one-dimensional and dense; empty if this rank has no element.
    """

    start: int
    memory: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], shape: Sequence[int], start: int, memory: torch.Tensor) -> Self:
        """Describe ``memory``, which is shared, as a part of a tensor of ``shape``."""
        make: Any = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - torch documents it so
        shard = make(cls, torch.Size(shape), dtype=memory.dtype, device=memory.device)
        shard.start = start
        # A tied parameter is identified by its address, so an empty run needs its own address too.
        shard.memory = memory if memory.numel() else memory.new_empty(1)[:0]
        return shard  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it so, and types another one
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        """Detach, or create a tensor of the same layout; refuse every other operation."""
        shard, packet = args[0], func.overloadpacket
        if packet is torch.ops.aten.detach:
            new_shard = cls(shard.shape, shard.start, shard.memory)
            new_shard.memory = shard.memory
            return new_shard
        if packet is torch.ops.aten.empty_like:
            dtype = (kwargs or {}).get("dtype") or shard.dtype
            return cls(shard.shape, shard.start, torch.empty_like(shard.memory, dtype=dtype))
        raise NotImplementedError(f"{func} needs the whole tensor, of which a rank holds a part")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the global shape and the range of elements in memory."""
        stop = self.start + self.memory.numel()
        return f"FlatShard(shape={tuple(self.shape)}, holds={self.start}:{stop})"


Runs = list[tuple[int, int]]
"""Runs of indices on one axis, (first, count), in the order of a rank's memory."""


def is_sharded(value: object) -> bool:
    """Return whether a tensor is sharded over ranks."""
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor | FlatShard)


def check_placements(tensor: torch.Tensor, path: str) -> None:
    """Reject a tensor with partial sums on its ranks.

    Raises:
        UnsavableState: No rank has the tensor's values.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    ):
        raise UnsavableState(
            f"`{path}` is an unreduced sum: its placements are {tensor.placements}",
            path=path,
            hint="reduce it in state_dict(): tensor.full_tensor()",
        )


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's local tensor, which shares its memory."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, FlatShard):
        return tensor.memory
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def local_shards(tensor: torch.Tensor) -> tuple[LocalShard, ...]:
    """Return the boxes of this rank; none if this rank has no element.

    Raises:
        UnsavableState: The tensor's memory does not match its placements.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, FlatShard):
        return _flat_boxes(tensor)
    assert isinstance(tensor, DTensor)  # noqa: S101 - for mypy
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    local = local_memory(tensor)
    axes = [
        axis_runs(size, axis, tensor.placements, tensor.device_mesh.shape, coordinate)
        for axis, size in enumerate(tensor.shape)
    ]
    if tuple(local.shape) != tuple(sum(count for _, count in runs) for runs in axes):
        raise UnsavableState(
            f"a tensor of shape {tuple(tensor.shape)} with placements {tensor.placements} holds "
            f"{tuple(local.shape)} here, which is not its expected share",
            hint="report this error, and say how the tensor was created",
        )
    if tensor.numel() == 0:
        return ()
    return tuple(_box(local, placement) for placement in product(*map(_placed, axes)))


def _flat_boxes(tensor: FlatShard) -> tuple[LocalShard, ...]:
    boxes, place = [], 0
    for region in flat_regions(tensor.shape, tensor.start, tensor.memory.numel()):
        data = tensor.memory.narrow(0, place, region.size).view(region.lengths)
        boxes.append(LocalShard(region, data))
        place += region.size
    return tuple(boxes)


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return (first index, length, position in local memory) of each run."""
    place, placed_runs = 0, []
    for first, count in runs:
        placed_runs.append((first, count, place))
        place += count
    return placed_runs


def _box(local: torch.Tensor, placement: Sequence[tuple[int, int, int]]) -> LocalShard:
    data = local
    for axis, (_, count, place) in enumerate(placement):
        data = data.narrow(axis, place, count)
    region = Region(tuple(value[0] for value in placement), tuple(value[1] for value in placement))
    return LocalShard(region, data)


def axis_runs(
    size: int,
    axis: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Runs:
    """Return the part of one axis that the rank at ``coordinate`` of the mesh has.

    Args:
        size: Global length of the axis.
        axis: Number of the axis.
        placements: One per dimension of the mesh.
        mesh_shape: Ranks per dimension of the mesh.
        coordinate: Coordinate of the rank, per dimension of the mesh.
    """
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    runs: Runs = [(0, size)] if size else []
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard | _StridedShard) and placement.dim == axis:
            pieces = placement.split_factor if isinstance(placement, _StridedShard) else 1
            runs = _chunks(runs, int(pieces), ranks, rank)
    return runs


def _chunks(runs: Runs, pieces: int, ranks: int, rank: int) -> Runs:
    """Cut ``runs`` into ``pieces``, and join the chunks of ``rank`` from all pieces."""
    length = sum(count for _, count in runs)
    own_runs: Runs = []
    for piece in range(pieces):
        begin, end = _chunk(length, pieces, piece)
        first, last = _chunk(end - begin, ranks, rank)
        for start, count in _cut(runs, begin + first, begin + last):
            if own_runs and sum(own_runs[-1]) == start:
                own_runs[-1] = (own_runs[-1][0], own_runs[-1][1] + count)
            else:
                own_runs.append((start, count))
    return own_runs


def _chunk(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (first, last) of one chunk of ``torch.chunk``; the last chunks may be empty."""
    step = -(-length // ranks)
    return min(step * rank, length), min(step * (rank + 1), length)


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """Return the positions from ``begin`` to ``end`` of concatenated runs."""
    cut_runs: Runs = []
    place = 0
    for start, count in runs:
        first, last = max(begin - place, 0), min(end - place, count)
        if last > first:
            cut_runs.append((start + first, last - first))
        place += count
    return cut_runs


def holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks with the same boxes as this rank, ascending; this rank is among them."""
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, FlatShard):
        return (dist.get_rank(),)
    assert isinstance(tensor, DTensor)  # noqa: S101 - for mypy
    coordinate = tensor.device_mesh.get_coordinate() or ()
    index = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(tensor.device_mesh.mesh[index].flatten().tolist()))


TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
