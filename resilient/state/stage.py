"""Copy a snapshot into host memory that training cannot touch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import UnsavableState
from resilient.format.manifest import PartEntry, StoredRegion, TensorEntry
from resilient.format.names import STATE_DOCUMENT, rank_part_file, shard_name
from resilient.format.regions import Region, whole
from resilient.format.shard import HostFile, Slot, lay_out
from resilient.state.bundles import bundled
from resilient.state.dtypes import DTYPE_NAMES
from resilient.state.shares import Piece, share_of, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.state.capture import CapturedPart, Snapshot
    from resilient.state.partition import TensorSpec
    from resilient.world.world import World


@dataclass(frozen=True, slots=True)
class Staged:
    """One rank's files in host memory, and the parts whose documents are among them."""

    files: tuple[HostFile, ...]
    parts: tuple[PartEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self.files)


class Arena:
    """Host buffers that are used again, because fresh pages cost several times the copy.

    Args:
        allocate: gives memory for a file of this name and length, private by default.
    """

    def __init__(self, allocate: Callable[[str, int], memoryview] | None = None) -> None:
        self._allocate = allocate or (lambda _, size_bytes: memoryview(bytearray(size_bytes)))
        self._buffers: dict[str, memoryview] = {}

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory for a file, the same as last time if it fits."""
        held = self._buffers.get(name)
        if held is None or len(held) < size_bytes:
            held = self._buffers[name] = self._allocate(name, size_bytes)
        return held[:size_bytes]


def stage(snapshot: Snapshot, world: World, arena: Arena) -> Staged:
    """Copy this rank's share of a snapshot into host memory.

    After this returns the live state may change. At most one Staged of an arena is in use.

    Collective: every rank, same step; the ranks do not talk.
    Crash: nothing was stored; the checkpoint does not exist.

    Args:
        snapshot: state of this rank; tensors on any device, any strides.
        world: who this rank is; a replicated part is split evenly over its size.
        arena: the buffers to use.

    Returns:
        One safetensors file per part with tensors to write, several of a large one, and on the
        coordinator the documents.
    """
    replicated = [part for part in snapshot.parts if part.scope == "replicated"]
    own = [part for part in snapshot.parts if part.scope == "rank"]
    files = [file for part in replicated for file in _stage_share(part, world, arena)]
    files += [_stage_own(part, world.rank, arena) for part in own]
    entries = [PartEntry(part.name, "rank", _own_file(part, world.rank)) for part in own]
    if world.is_coordinator:
        files += _documents(replicated)
        entries += [
            PartEntry(part.name, "replicated", part.document or STATE_DOCUMENT)
            for part in replicated
        ]
    return Staged(tuple(files), tuple(entries))


def _stage_share(part: CapturedPart, world: World, arena: Arena) -> list[HostFile]:
    bundles = bundled(share_of(part.tensors, world))
    numbers = [None] if len(bundles) == 1 else range(len(bundles))
    return [
        _pack(shard_name(part.name, world.rank, number), part.name, bundle, {}, arena)
        for number, bundle in zip(numbers, bundles, strict=False)
    ]


def _own_file(part: CapturedPart, rank: int) -> str:
    return rank_part_file(part.name.removesuffix(f"_{rank}"), rank)


def _stage_own(part: CapturedPart, rank: int, arena: Arena) -> HostFile:
    share = [
        Piece(spec_of(name, tensor), whole(tensor.shape), tensor)
        for name, tensor in part.tensors.items()
    ]
    metadata = {"state": _text(part.tree)}
    return _pack(_own_file(part, rank), part.name, share, metadata, arena)


def _pack(
    name: str,
    part: str,
    share: Sequence[Piece],
    metadata: dict[str, str],
    arena: Arena,
) -> HostFile:
    """Lay regions out as one safetensors file and copy them into a buffer of the arena."""
    keys = [_key_in_file(part, piece.spec, piece.region) for piece in share]
    slots = [
        Slot(key, piece.spec.dtype, piece.region.lengths)
        for key, piece in zip(keys, share, strict=True)
    ]
    layout = lay_out(slots, metadata)
    buffer = arena.buffer(name, layout.size_bytes)
    buffer[: len(layout.head)] = layout.head
    entries = []
    for key, piece in zip(keys, share, strict=True):
        spec, start = piece.spec, layout.starts[key]
        size_bytes = _copy_box(piece.data, piece.region, buffer, start)
        place = StoredRegion(piece.region, name, start, size_bytes)
        entries.append(TensorEntry(spec.name, part, spec.dtype, spec.shape, (place,)))
    return HostFile(name, buffer, tuple(entries))


def _key_in_file(part: str, spec: TensorSpec, region: Region) -> str:
    """Return the tensor's name as its own part knows it, with the region if it is only a piece."""
    path = spec.name.removeprefix(f"{part}/")
    return path if region.is_whole(spec.shape) else f"{path}@{region}"


def _copy_box(data: torch.Tensor, region: Region, buffer: memoryview, start: int) -> int:
    """Copy a box's elements row-major to ``buffer`` from ``start``; return their bytes."""
    size_bytes = region.size * data.element_size()
    if size_bytes:
        target = torch.frombuffer(buffer, dtype=data.dtype, count=region.size, offset=start)
        target.view(region.lengths).copy_(data)
    return size_bytes


def pack(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> memoryview:
    """Return whole tensors as one safetensors file in memory.

    Args:
        tensors: by name; any device, any strides.
        metadata: strings for the file's header.

    Raises:
        UnsavableState: a tensor has a dtype that safetensors cannot hold.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsavableState(f"`{name}` is {tensor.dtype}, which has no place there", path=name)
    layout = lay_out(
        [Slot(name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()],
        metadata,
    )
    buffer = memoryview(bytearray(layout.size_bytes))
    buffer[: len(layout.head)] = layout.head
    for name, tensor in tensors.items():
        _copy_box(tensor.detach(), whole(tensor.shape), buffer, layout.starts[name])
    return buffer


def _documents(parts: Sequence[CapturedPart]) -> list[HostFile]:
    """Return ``state.json`` and the documents that parts have of their own."""
    shared = {part.name: part.tree for part in parts if not part.document}
    own = [
        HostFile(part.document, _text(part.tree, indent=2).encode() + b"\n")
        for part in parts
        if part.document
    ]
    return [HostFile(STATE_DOCUMENT, _text(shared).encode() + b"\n"), *own]


def _text(tree: Any, indent: int | None = None) -> str:
    return json.dumps(tree, sort_keys=indent is not None, indent=indent, allow_nan=False)
