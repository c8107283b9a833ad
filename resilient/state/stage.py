"""Copy a snapshot into host memory that training cannot touch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import UnsavableState
from resilient.format.manifest import PartEntry, StoredRegion, TensorEntry
from resilient.format.names import STATE_DOCUMENT, rank_part_file, shard_name
from resilient.format.regions import Region, whole
from resilient.format.shard import HostFile, Slot, lay_out
from resilient.state.bundles import bundled
from resilient.state.copying import Copies, Copy
from resilient.state.dtypes import DTYPE_NAMES
from resilient.state.shares import Piece, share_of, spec_of
from resilient.state.steady import address_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from resilient.format.shard import Layout
    from resilient.state.arena import Arena
    from resilient.state.capture import CapturedPart, Snapshot
    from resilient.state.copying import Making
    from resilient.state.partition import TensorSpec
    from resilient.world.world import World


# Below this, to copy takes less time than to keep books of what is not copied yet.
_LATER_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True)
class Staged:
    """One rank's files in host memory, and the parts whose documents are among them.

    Attributes:
        files: whole once ``rest`` is made.
        parts: the parts whose documents are among them.
        rest: what is not copied yet.
    """

    files: tuple[HostFile, ...]
    parts: tuple[PartEntry, ...]
    rest: Copies

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self.files)


@dataclass(frozen=True, slots=True)
class Draft:
    """A file that has a layout and no bytes yet.

    Attributes:
        name: file name inside the checkpoint's folder.
        part: whose tensors it holds.
        layout: where everything of it goes.
        pieces: what to copy, by key in the file.
    """

    name: str
    part: str
    layout: Layout
    pieces: Mapping[str, Piece]

    def entries(self) -> tuple[TensorEntry, ...]:
        """Return what the manifest says of the file's tensors."""
        return tuple(
            TensorEntry(
                piece.spec.name,
                self.part,
                piece.spec.dtype,
                piece.spec.shape,
                (StoredRegion(piece.region, self.name, self.layout.starts[key], size_of(piece)),),
            )
            for key, piece in self.pieces.items()
        )

    def copies(self, buffer: memoryview) -> list[Copy]:
        """Return the copies that fill the file's memory, and write its header there."""
        buffer[: len(self.layout.head)] = self.layout.head
        return [
            Copy(piece.spec.name, piece.data, buffer, self.layout.starts[key])
            for key, piece in self.pieces.items()
        ]


def size_of(piece: Piece) -> int:
    """Return how many bytes of a file a piece takes."""
    return piece.region.size * piece.data.element_size()


def stage(
    snapshot: Snapshot, world: World, arena: Arena, steady: Collection[int] = frozenset()
) -> Staged:
    """Copy this rank's share of a snapshot into host memory.

    After this returns the live state may change, but for what is ``steady``: that may change
    once ``rest`` of the result is made. At most one Staged of an arena is in use.

    Collective: every rank, same step; the ranks do not talk.
    Crash: nothing was stored; the checkpoint does not exist.

    Args:
        snapshot: state of this rank; tensors on any device, any strides.
        world: who this rank is; a replicated part is split evenly over its size.
        arena: the buffers to use.
        steady: addresses of storages that nobody changes until ``rest`` is made.

    Returns:
        One safetensors file per part with tensors to write, several of a large one, and on the
        coordinator the documents.
    """
    drafts = draft(snapshot, world)
    buffers = [arena.buffer(one.name, one.layout.size_bytes) for one in drafts]
    later: list[Making] = []
    now: list[Copy] = []
    for one, buffer in zip(drafts, buffers, strict=True):
        waiting, at_once = _part_by_haste(one.copies(buffer), steady)
        later += _begin(waiting, one.name, arena)
        now += at_once
    for copy in now:
        copy.make()
    files = [
        HostFile(one.name, buffer, one.entries())
        for one, buffer in zip(drafts, buffers, strict=True)
    ]
    documents, parts = _said(snapshot, world)
    return Staged((*files, *documents), parts, Copies(later))


def draft(snapshot: Snapshot, world: World) -> list[Draft]:
    """Return the files with tensors that this rank writes of a snapshot; nothing is copied."""
    drafts = []
    for part in snapshot.parts:
        if part.scope == "replicated":
            drafts += _draft_share(part, world)
    return drafts + [
        _draft_own(part, world.rank) for part in snapshot.parts if part.scope == "rank"
    ]


def _part_by_haste(
    copies: Sequence[Copy], steady: Collection[int]
) -> tuple[list[Copy], list[Copy]]:
    """Return the copies that can wait, and those that cannot or are not worth it."""
    waiting: list[Copy] = []
    at_once: list[Copy] = []
    for one in copies:
        waits = one.source.nbytes >= _LATER_BYTES_MIN and address_of(one.source) in steady
        (waiting if waits else at_once).append(one)
    return waiting, at_once


def _begin(copies: list[Copy], file: str, arena: Arena) -> list[Making]:
    """Return what is to be done for these copies into one file; a device begins with its own."""
    on_device = [one for one in copies if one.source.is_cuda]
    work: list[Making] = [one for one in copies if not one.source.is_cuda]
    if on_device:
        # Only a process with a GPU pays for this.
        from resilient.state.device import DeviceCopies

        arena.lock(file)
        work.append(DeviceCopies(on_device))
    return work


def _said(snapshot: Snapshot, world: World) -> tuple[list[HostFile], tuple[PartEntry, ...]]:
    """Return the documents that this rank writes, and the parts that they are of."""
    replicated = [part for part in snapshot.parts if part.scope == "replicated"]
    entries = [
        PartEntry(part.name, "rank", _own_file(part, world.rank))
        for part in snapshot.parts
        if part.scope == "rank"
    ]
    if not world.is_coordinator:
        return [], tuple(entries)
    entries += [
        PartEntry(part.name, "replicated", part.document or STATE_DOCUMENT) for part in replicated
    ]
    return _documents(replicated), tuple(entries)


def _draft_share(part: CapturedPart, world: World) -> list[Draft]:
    bundles = bundled(share_of(part.tensors, world))
    numbers = [None] if len(bundles) == 1 else range(len(bundles))
    return [
        _lay_out(shard_name(part.name, world.rank, number), part.name, bundle, {})
        for number, bundle in zip(numbers, bundles, strict=False)
    ]


def _own_file(part: CapturedPart, rank: int) -> str:
    return rank_part_file(part.name.removesuffix(f"_{rank}"), rank)


def _draft_own(part: CapturedPart, rank: int) -> Draft:
    share = [
        Piece(spec_of(name, tensor), whole(tensor.shape), tensor)
        for name, tensor in part.tensors.items()
    ]
    return _lay_out(_own_file(part, rank), part.name, share, {"state": _text(part.tree)})


def _lay_out(name: str, part: str, share: Sequence[Piece], metadata: dict[str, str]) -> Draft:
    """Lay regions out as one safetensors file."""
    pieces = {_key_in_file(part, piece.spec, piece.region): piece for piece in share}
    assert len(pieces) == len(share), "a file never holds one key twice"  # noqa: S101
    slots = [Slot(key, piece.spec.dtype, piece.region.lengths) for key, piece in pieces.items()]
    return Draft(name, part, lay_out(slots, metadata), pieces)


def _key_in_file(part: str, spec: TensorSpec, region: Region) -> str:
    """Return the tensor's name as its own part knows it, with the region if it is only a piece."""
    path = spec.name.removeprefix(f"{part}/")
    return path if region.is_whole(spec.shape) else f"{path}@{region}"


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
        Copy(name, tensor.detach(), buffer, layout.starts[name]).make()
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
