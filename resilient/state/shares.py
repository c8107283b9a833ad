"""What this rank writes of a part: a share of what is replicated, and the shards it holds."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from resilient.format.dtypes import ITEM_BYTES
from resilient.format.regions import Region, whole
from resilient.state.dtypes import DTYPE_NAMES
from resilient.state.partition import TensorSpec, partition
from resilient.state.tree import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.world.world import World


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One region that this rank writes.

    Attributes:
        spec: the global tensor.
        region: which box of it.
        data: the box's elements, any device, any strides.
    """

    spec: TensorSpec
    region: Region
    data: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Length of the box's elements in bytes."""
        return self.region.size * ITEM_BYTES[self.spec.dtype]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return a tensor's name, dtype and global shape."""
    return TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def share_of(tensors: Mapping[str, torch.Tensor], world: World) -> list[Piece]:
    """Return what this rank writes, so that all ranks together write every element once.

    Tensors that the same ranks hold are split evenly over those ranks: plain tensors over all,
    shards of a mesh with a replicated dimension over their replicas. A shard that no other rank
    holds is written by its holder alone, where it lies.

    Args:
        tensors: by name; the same names on every rank, in the same order.
        world: who this rank is.
    """
    everyone = tuple(range(world.size))
    groups: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for name, tensor in tensors.items():
        spec = spec_of(name, tensor)
        if not spec.size_bytes:
            # Nobody holds a part of it; it is there all the same.
            nothing = torch.empty(spec.shape, dtype=tensor.dtype)
            groups[everyone].append(Piece(spec, whole(spec.shape), nothing))
            continue
        if type(tensor) in PLAIN:
            groups[everyone].append(Piece(spec, whole(spec.shape), tensor))
            continue
        # Only sharded training pays for loading torch's part about it.
        from resilient.state.placement import boxes_of, holders

        for box in boxes_of(tensor):
            groups[holders(tensor)].append(Piece(spec, box.region, box.data))
    return [
        piece
        for ranks, pieces in groups.items()
        for piece in _split(pieces, len(ranks), ranks.index(world.rank))
    ]


def _split(pieces: list[Piece], ranks: int, rank: int) -> list[Piece]:
    """Return one rank's share of pieces that ``ranks`` ranks hold."""
    if ranks == 1:
        return pieces
    specs = [
        TensorSpec(str(number), piece.spec.dtype, piece.region.lengths)
        for number, piece in enumerate(pieces)
    ]
    return [_narrow(pieces[int(spec.name)], part) for spec, part in partition(specs, ranks)[rank]]


def cut(piece: Piece, count: int) -> list[Piece]:
    """Return a piece cut between its rows in ``count`` pieces of nearly equal bytes.

    With fewer rows than that, or when it is small, there are fewer.
    """
    return [one for number in range(count) for one in _split([piece], count, number)]


def _narrow(piece: Piece, part: Region) -> Piece:
    """Return a part of a piece; ``part`` is in the piece's own coordinates."""
    data = box_of(piece.data, part)
    offsets = tuple(map(sum, zip(piece.region.offsets, part.offsets, strict=True)))
    return Piece(piece.spec, Region(offsets, part.lengths), data)


def box_of(data: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a box of a tensor, in the tensor's own coordinates; shares its memory."""
    if not region.size or region.is_whole(data.shape):
        return data
    for axis, (offset, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
        data = data.narrow(axis, offset, length)
    return data
