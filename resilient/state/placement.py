"""Which boxes of a sharded tensor this rank holds, and which ranks hold the same ones.

Source of the arithmetic: ``torch.distributed.tensor`` (2.13). Placements are applied from the
first mesh dimension to the last. ``Shard`` cuts what is left of an axis as ``torch.chunk`` does,
so the last ranks may hold less or nothing. ``_StridedShard`` (FSDP over a tensor-parallel model)
cuts it in ``split_factor`` pieces first and takes the same chunk of each, so what a rank holds of
an axis may be several runs. ``tests/property/test_placement.py`` holds this against torch.

A :class:`FlatShard` is cut between any two elements, as ZeRO does, and held by one rank alone.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from resilient.errors import UnsavableState
from resilient.format.regions import Region, flat_regions
from resilient.state.boxes import Box
from resilient.state.flat import FlatShard

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.tensor.placement_types import Placement

Runs = list[tuple[int, int]]
"""Runs of indices on one axis, (first, how many), in the order in which a rank holds them."""


def is_sharded(value: object) -> bool:
    """Say whether a tensor is spread over ranks."""
    return isinstance(value, DTensor | FlatShard)


def check_placements(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose ranks hold summands of it.

    Raises:
        UnsavableState: no rank holds its values.
    """
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        raise UnsavableState(
            f"`{path}` is a sum that was not made yet: its placements are {tensor.placements}",
            path=path,
            hint="reduce it in state_dict(): tensor.full_tensor()",
        )


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that this rank holds, sharing its memory."""
    if isinstance(tensor, FlatShard):
        return tensor.memory
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def boxes_of(tensor: torch.Tensor) -> tuple[Box, ...]:
    """Return the boxes that this rank holds; none if it holds nothing.

    Raises:
        UnsavableState: its memory is not what its placements say.
    """
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
            f"{tuple(local.shape)} here, which is not its share",
            hint="report this with the way in which the tensor was made",
        )
    if tensor.numel() == 0:
        return ()
    return tuple(_box(local, chosen) for chosen in product(*map(_placed, axes)))


def _flat_boxes(tensor: FlatShard) -> tuple[Box, ...]:
    boxes, place = [], 0
    for region in flat_regions(tensor.shape, tensor.start, tensor.memory.numel()):
        data = tensor.memory.narrow(0, place, region.size).view(region.lengths)
        boxes.append(Box(region, data))
        place += region.size
    return tuple(boxes)


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return (first, how many, place in local memory) of each run."""
    place, placed = 0, []
    for first, count in runs:
        placed.append((first, count, place))
        place += count
    return placed


def _box(local: torch.Tensor, chosen: Sequence[tuple[int, int, int]]) -> Box:
    data = local
    for axis, (_, count, place) in enumerate(chosen):
        data = data.narrow(axis, place, count)
    region = Region(tuple(one[0] for one in chosen), tuple(one[1] for one in chosen))
    return Box(region, data)


def axis_runs(
    size: int,
    axis: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> Runs:
    """Return what the rank at ``coordinate`` of the mesh holds of one axis.

    Args:
        size: global length of the axis.
        axis: which one.
        placements: one per dimension of the mesh.
        mesh_shape: ranks per dimension of the mesh.
        coordinate: of the rank, per dimension of the mesh.
    """
    runs: Runs = [(0, size)] if size else []
    for placement, ranks, rank in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard | _StridedShard) and placement.dim == axis:
            pieces = placement.split_factor if isinstance(placement, _StridedShard) else 1
            runs = _chunks(runs, int(pieces), ranks, rank)
    return runs


def _chunks(runs: Runs, pieces: int, ranks: int, rank: int) -> Runs:
    """Cut ``runs`` in ``pieces``, each of them over ``ranks``, and join what ``rank`` gets."""
    length = sum(count for _, count in runs)
    taken: Runs = []
    for piece in range(pieces):
        begin, end = _chunk(length, pieces, piece)
        first, last = _chunk(end - begin, ranks, rank)
        for start, count in _cut(runs, begin + first, begin + last):
            if taken and sum(taken[-1]) == start:
                taken[-1] = (taken[-1][0], taken[-1][1] + count)
            else:
                taken.append((start, count))
    return taken


def _chunk(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (first, last) of one chunk of ``torch.chunk``; those that are left over are empty."""
    step = -(-length // ranks)
    return min(step * rank, length), min(step * (rank + 1), length)


def _cut(runs: Runs, begin: int, end: int) -> Runs:
    """Return the positions from ``begin`` to ``end`` of runs that are laid end to end."""
    taken: Runs = []
    place = 0
    for start, count in runs:
        first, last = max(begin - place, 0), min(end - place, count)
        if last > first:
            taken.append((start + first, last - first))
        place += count
    return taken


def holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks that hold the same boxes as this one, ascending; this one is among them."""
    if isinstance(tensor, FlatShard):
        return (dist.get_rank(),)
    assert isinstance(tensor, DTensor)  # noqa: S101 - for mypy
    coordinate = tensor.device_mesh.get_coordinate() or ()
    chosen = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(tensor.device_mesh.mesh[chosen].flatten().tolist()))
