"""Copy a snapshot into host memory that training cannot touch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.errors import UnsavableState
from resilient.format.manifest import PartEntry
from resilient.format.names import STATE_DOCUMENT
from resilient.format.shard import HostFile, Slot, lay_out
from resilient.state.copying import Copies, copy_all, target_in
from resilient.state.drafts import Drafts, own_file
from resilient.state.dtypes import DTYPE_NAMES
from resilient.state.spelling import document_of, text_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from resilient.format.shard import StreamedFile
    from resilient.state.arena import Arena
    from resilient.state.capture import CapturedPart, Snapshot
    from resilient.state.copying import Copy, Making
    from resilient.state.drafts import Draft
    from resilient.world.world import World


@dataclass(frozen=True, slots=True)
class Staged:
    """One rank's files in host memory, and the parts whose documents are among them.

    Attributes:
        files: whole once ``rest`` is made.
        parts: the parts whose documents are among them.
        rest: what is not copied yet.
        streamed: files for which there is no room: the live state must not change until they
            are persisted.
    """

    files: tuple[HostFile, ...]
    parts: tuple[PartEntry, ...]
    rest: Copies
    streamed: tuple[StreamedFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self.files)


def stage(
    snapshot: Snapshot,
    world: World,
    arena: Arena,
    steady: Collection[int] = frozenset(),
    small: Collection[int] = frozenset(),
) -> Staged:
    """Copy this rank's share of a snapshot into host memory.

    After this returns the live state may change, but for what is ``steady``: that may change
    once ``rest`` of the result is made. At most one Staged of an arena is in use.

    Where the arena has no room nothing is copied: the files are to be streamed.

    Collective: every rank, same step; the ranks do not talk.
    Crash: nothing was stored; the checkpoint does not exist.

    Args:
        snapshot: state of this rank; tensors on any device, any strides.
        world: who this rank is; a replicated part is split evenly over its size.
        arena: the buffers to use; it knows the layout of what was staged there before.
        steady: addresses of storages that nobody changes until ``rest`` is made.
        small: of those of them that are left to ``rest`` however small a tensor in them is.

    Returns:
        One safetensors file per part with tensors to write, several of a large one, and on the
        coordinator the documents.
    """
    files = arena.drafts.of(snapshot, world)
    documents, parts = _said(snapshot, world)
    sizes = {one.name: one.layout.size_bytes for one in files}
    if not arena.has_room(sizes | {one.name: one.size_bytes for one in documents}):
        return Staged(tuple(documents), parts, Copies(), tuple(one.streamed() for one in files))
    buffers = [arena.buffer(one.name, one.layout.size_bytes) for one in files]
    later: list[Making] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for one, buffer in zip(files, buffers, strict=True):
        split = arena.splits.of(one, arena.targets(one, buffer), steady, small)
        later += split.waiting
        if split.on_device:
            later.append(_begin(split.on_device, one.name, arena))
        sources += split.sources
        targets += split.targets
    copy_all(sources, targets)
    filled = [
        HostFile(one.name, buffer, one.entries) for one, buffer in zip(files, buffers, strict=True)
    ]
    return Staged((*filled, *documents), parts, Copies(later))


def draft(snapshot: Snapshot, world: World) -> list[Draft]:
    """Return the files with tensors that this rank writes of a snapshot; nothing is copied."""
    return Drafts().of(snapshot, world)


def _begin(copies: list[Copy], file: str, arena: Arena) -> Making:
    """Have a device begin with its copies into a file."""
    # Only a process with a GPU pays for this.
    from resilient.state.device import DeviceCopies

    arena.lock(file)
    return DeviceCopies(copies)


def _said(snapshot: Snapshot, world: World) -> tuple[list[HostFile], tuple[PartEntry, ...]]:
    """Return the documents that this rank writes, and the parts that they are of."""
    replicated = [part for part in snapshot.parts if part.scope == "replicated"]
    entries = [
        PartEntry(part.name, "rank", own_file(part, world.rank))
        for part in snapshot.parts
        if part.scope == "rank"
    ]
    if not world.is_coordinator:
        return [], tuple(entries)
    entries += [
        PartEntry(part.name, "replicated", part.document or STATE_DOCUMENT) for part in replicated
    ]
    return _documents(replicated), tuple(entries)


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
        target_in(buffer, layout.starts[name], tensor).copy_(tensor.detach())
    return buffer


def _documents(parts: Sequence[CapturedPart]) -> list[HostFile]:
    """Return ``state.json`` and the documents that parts have of their own."""
    shared = {part.name: part.tree for part in parts if not part.document}
    own = [
        HostFile(part.document, document_of(part.tree).encode()) for part in parts if part.document
    ]
    return [HostFile(STATE_DOCUMENT, text_of(shared).encode() + b"\n"), *own]
