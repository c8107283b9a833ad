"""Copy a snapshot into host buffers; buffer pool; deferred copies.

Which memory training leaves alone between two optimizer steps.

Copy a snapshot into host memory that training cannot touch.

Which tensors of a file are copied at once, and which can wait; kept for files known again.

What outlives a save: host buffers, for fresh pages cost several times the copy, and plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from resilient.errors import UnsavableState
from resilient.format.keys import STATE_DOCUMENT
from resilient.format.manifest import PartEntry
from resilient.format.safetensors_file import StagedFile, TensorSlot, compute_layout
from resilient.state_dict.capture_cache import CachedTensors
from resilient.state_dict.flatten import PLAIN
from resilient.state_dict.host_copy import (
    DeferredCopies,
    HostCopyBatch,
    TensorCopy,
    copy_all,
    target_in,
)
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.planner import SavePlanner, document_to_json, own_file, tree_to_json
from resilient.state_dict.sharding import DTYPE_NAMES
from resilient.storage.shared_memory import PrivateBuffers, prefault

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from resilient.distributed.launch_env import World
    from resilient.format.safetensors_file import FileLayout, StreamedFile
    from resilient.state_dict.host_copy import PendingCopy
    from resilient.state_dict.planner import PlannedFile
    from resilient.state_dict.snapshot import FlattenedPart, Part, Snapshot

# Below this, to copy takes less time than to keep books of what is not copied yet; and some models
# clamp a small parameter of theirs in a forward pass.
_LATER_BYTES_MIN = 64 << 10
_KINDS = frozenset(PLAIN)
_DICTS = frozenset({dict})
_values_of = methodcaller("values")


def stable_storages(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that only an optimizer's step changes.

    These are the parameters that an optimizer among the parts holds, and its state. A forward
    pass may change everything else: buffers such as BatchNorm's, random state, parameters that
    no optimizer of this save holds. A part may say itself what it holds, by a method ``steady()``
    that yields tensors.
    """
    return _addresses(one for part in parts.values() for one in _steady(part.stateful))


def state_memory(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that hold the state of torch's optimizers, and nothing else.

    No model's forward pass knows them. Parameters may be among what is steady, and a model that
    keeps a number of its own within bounds changes it all the same; what an optimizer keeps may
    be the memory of a parameter.
    """
    found = [*filter(None, (_optimizer_of(part.stateful) for part in parts.values()))]
    kept = _addresses(one for optimizer in found for one in _kept(optimizer))
    return kept - _addresses(one for optimizer in found for one in _parameters(optimizer))


class StableStorageCache:
    """Knows what is steady as long as optimizers keep the memory that they had.

    To go through all that they keep takes as long, at each step, as to copy a part of it.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._alive: list[Any] = []
        self._found = frozenset[int](), frozenset[int]()

    def of(
        self, parts: Mapping[str, Part], snapshot: Snapshot
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return what :func:`steady_memory` and :func:`state_memory` do.

        Args:
            parts: by name.
            snapshot: of these parts, just now.
        """
        pairs = [*zip(parts.values(), (one.tensors for one in snapshot.parts), strict=True)]
        layout = [_layout_of(part.stateful, tensors) for part, tensors in pairs]
        if None in layout or layout != self._layout:
            self._found = stable_storages(parts), state_memory(parts)
            # An object is known by its number only while it lives.
            self._layout, self._alive = layout, [tensors for _, tensors in pairs]
        return self._found


def is_deferrable(
    source: torch.Tensor, steady: Collection[int], small: Collection[int] = frozenset()
) -> bool:
    """Say whether a tensor is better copied beside training.

    Args:
        source: to copy.
        steady: addresses of storages that nobody changes for a while.
        small: addresses of those that wait however small a tensor in them is.
    """
    address = address_of(source)
    return address in steady and (source.nbytes >= _LATER_BYTES_MIN or address in small)


def _addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    held = [*tensors]
    if _KINDS.issuperset(map(type, held)) and not any(map(torch.Tensor.storage_offset, held)):
        # Each begins where its storage does; to ask a tensor for its storage takes longer.
        return frozenset(map(torch.Tensor.data_ptr, held))
    return frozenset(map(address_of, held))


def _steady(stateful: Any) -> Iterable[torch.Tensor]:
    if _says_itself(stateful):
        return stateful.steady()  # type: ignore[no-any-return]  # what a Stateful of anyone returns
    optimizer = _optimizer_of(stateful)
    return _held(optimizer) if optimizer is not None else ()


def _says_itself(stateful: Any) -> bool:
    # What somebody's module or optimizer has by that name is something else.
    is_torchs = isinstance(stateful, torch.nn.Module | torch.optim.Optimizer)
    return not is_torchs and callable(getattr(type(stateful), "steady", None))


def _layout_of(stateful: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...] | None:
    """Return where the memory of an optimizer lies; None if that is not known so.

    Args:
        stateful: any.
        tensors: what it said just now.
    """
    if _says_itself(stateful):
        return None
    optimizer = _optimizer_of(stateful)
    if optimizer is None:
        return ()
    held = _parameters(optimizer)
    if not isinstance(tensors, CachedTensors) or not _KINDS.issuperset(map(type, held)):
        return None
    return id(tensors), [*map(torch.Tensor.data_ptr, chain(held, tensors.values()))]


def _optimizer_of(stateful: Any) -> torch.optim.Optimizer | None:
    one = stateful.optimizer if isinstance(stateful, NamedOptimizer) else stateful
    return one if isinstance(one, torch.optim.Optimizer) else None


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage that a tensor lies in on this rank; 0 is nowhere."""
    if type(tensor) in PLAIN:
        return tensor.untyped_storage().data_ptr()
    # Only sharded training pays for loading torch's part about it.
    from resilient.state_dict.sharding import is_sharded, local_memory

    return local_memory(tensor).untyped_storage().data_ptr() if is_sharded(tensor) else 0


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return _parameters(optimizer) + _kept(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _kept(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [*optimizer.state.values()]
    # Mostly a dict for each parameter; torch takes and restores anything else as well.
    dicts = states if _DICTS.issuperset(map(type, states)) else [*map(_dict_of, states)]
    values = [*chain.from_iterable(map(_values_of, dicts))]
    if _KINDS.issuperset(map(type, values)):
        return values
    return [one for one in values if isinstance(one, torch.Tensor)]


def _dict_of(state: Any) -> dict[Any, Any]:
    return state if isinstance(state, dict) else {"": state}


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """One rank's files in host memory, and the parts whose documents are among them.

    Attributes:
        files: whole once ``rest`` is made.
        parts: the parts whose documents are among them.
        rest: what is not copied yet.
        streamed: files for which there is no room: the live state must not change until they
            are persisted.
    """

    files: tuple[StagedFile, ...]
    parts: tuple[PartEntry, ...]
    rest: DeferredCopies
    streamed: tuple[StreamedFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self.files)


def stage(
    snapshot: Snapshot,
    world: World,
    arena: StagingBuffers,
    steady: Collection[int] = frozenset(),
    small: Collection[int] = frozenset(),
) -> StagedSnapshot:
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
        return StagedSnapshot(
            tuple(documents), parts, DeferredCopies(), tuple(one.streamed() for one in files)
        )
    buffers = [arena.buffer(one.name, one.layout.size_bytes) for one in files]
    later: list[PendingCopy] = []
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
        StagedFile(one.name, buffer, one.entries)
        for one, buffer in zip(files, buffers, strict=True)
    ]
    return StagedSnapshot((*filled, *documents), parts, DeferredCopies(later))


def draft(snapshot: Snapshot, world: World) -> list[PlannedFile]:
    """Return the files with tensors that this rank writes of a snapshot; nothing is copied."""
    return SavePlanner().of(snapshot, world)


def _begin(copies: list[TensorCopy], file: str, arena: StagingBuffers) -> PendingCopy:
    """Have a device begin with its copies into a file."""
    # Only a process with a GPU pays for this.
    from resilient.state_dict.host_copy import DeviceCopies

    arena.lock(file)
    return DeviceCopies(copies)


def _said(snapshot: Snapshot, world: World) -> tuple[list[StagedFile], tuple[PartEntry, ...]]:
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


def to_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> memoryview:
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
    layout = compute_layout(
        [
            TensorSlot(name, DTYPE_NAMES[one.dtype], tuple(one.shape))
            for name, one in tensors.items()
        ],
        metadata,
    )
    buffer = memoryview(bytearray(layout.size_bytes))
    buffer[: len(layout.head)] = layout.head
    for name, tensor in tensors.items():
        target_in(buffer, layout.starts[name], tensor).copy_(tensor.detach())
    return buffer


def _documents(parts: Sequence[FlattenedPart]) -> list[StagedFile]:
    """Return ``state.json`` and the documents that parts have of their own."""
    shared = {part.name: part.tree for part in parts if not part.document}
    own = [
        StagedFile(part.document, document_to_json(part.tree).encode())
        for part in parts
        if part.document
    ]
    return [StagedFile(STATE_DOCUMENT, tree_to_json(shared).encode() + b"\n"), *own]


_TOGETHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class CopySchedule:
    """The copies that fill one file.

    Attributes:
        steady: addresses of the storages that can wait.
        small: of those of them that can wait however small a tensor in them is.
        waiting: copies within host memory that can wait, some together.
        on_device: copies from a device that can wait.
        sources: what cannot wait.
        targets: where each of these goes.
    """

    steady: Collection[int]
    small: Collection[int]
    waiting: list[HostCopyBatch]
    on_device: list[TensorCopy]
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        file: PlannedFile,
        into: Sequence[torch.Tensor],
        steady: Collection[int],
        small: Collection[int],
    ) -> CopySchedule:
        """Return the copies of a file, those that wait for what is ``steady``."""
        waiting: list[TensorCopy] = []
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for entry, source, target in zip(file.entries, file.sources, into, strict=True):
            if is_deferrable(source, steady, small):
                waiting.append(TensorCopy(entry.name, source, target))
            else:
                sources.append(source)
                targets.append(target)
        together = [
            *map(HostCopyBatch, _together(one for one in waiting if not one.source.is_cuda))
        ]
        on_device = [one for one in waiting if one.source.is_cuda]
        return cls(steady, small, together, on_device, sources, targets)


def _together(copies: Iterable[TensorCopy]) -> Iterator[list[TensorCopy]]:
    """Yield copies, small ones together, so that books are kept of few and two threads share."""
    some: list[TensorCopy] = []
    size_bytes = 0
    for one in copies:
        some.append(one)
        size_bytes += one.source.nbytes
        if size_bytes >= _TOGETHER_BYTES:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


class CopyScheduleCache:
    """Remembers how the files that are there were split, as long as somebody else knows them."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[PlannedFile, CopySchedule] = WeakKeyDictionary()

    def of(
        self,
        file: PlannedFile,
        into: Sequence[torch.Tensor],
        steady: Collection[int],
        small: Collection[int] = frozenset(),
    ) -> CopySchedule:
        """Return the copies of a file; none of those made before is under way.

        Args:
            file: what is staged.
            into: where its sources go; the same memory until ``forget`` is called.
            steady: addresses of storages that nobody changes for a while.
            small: of those of them that wait however small a tensor in them is.
        """
        known = self._known.get(file)
        if known is None or (known.steady, known.small) != (steady, small):
            known = self._known[file] = CopySchedule.of(file, into, steady, small)
            return known
        for one in known.waiting:
            one.renew()
        return known

    def forget(self, name: str) -> None:
        """Keep nothing that points into the memory of a file of this name."""
        for file in [one for one in self._known if one.name == name]:
            del self._known[file]


def has_idle_core(ranks: int, cores: float) -> bool:
    """Say whether something can be copied while training goes on that takes no core from it.

    Args:
        ranks: of this host, that compute with as many threads as this one.
        cores: that they may use.
    """
    # Work on a device leaves the host's cores alone, and a device copies by itself.
    has_device = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return has_device or ranks * torch.get_num_threads() < cores


class StagingBuffers:
    """Host buffers by the name of the file that is staged there.

    Args:
        allocate: gives at least so many bytes for a file of this name, the same as last time
            where it can; private memory by default.
        streams: says whether there is no room for files of these names and lengths; never, by
            default.

    Attributes:
        drafts: how the files that are staged here were laid out last.
        splits: how they were split into what waits and what does not.
    """

    def __init__(
        self,
        allocate: Callable[[str, int], memoryview] | None = None,
        streams: Callable[[Mapping[str, int]], bool] | None = None,
    ) -> None:
        self._streams = streams or (lambda _: False)
        self._allocate = allocate or PrivateBuffers().get
        self._buffers: dict[str, memoryview] = {}
        self._locked: dict[str, int] = {}
        self._targets: dict[str, tuple[FileLayout, tuple[torch.Tensor, ...]]] = {}
        self.drafts = SavePlanner()
        self.splits = CopyScheduleCache()

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Say whether files of these names and lengths can be staged; let go of all others.

        Raises:
            ConfigError: there is not even room to stream them.
        """
        streams = self._streams(sizes)
        for name in [one for one in self._buffers if streams or one not in sizes]:
            self._forget(name)
            del self._buffers[name]
        return not streams

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory for a file."""
        given = self._allocate(name, size_bytes)
        held = self._buffers.get(name)
        if held is None or held.obj is not given.obj:
            self._forget(name)
            self._buffers[name] = memoryview(given.obj)
        return given[:size_bytes]

    def targets(self, file: PlannedFile, buffer: memoryview) -> tuple[torch.Tensor, ...]:
        """Return where the sources of a file go in its memory, and write its header there.

        Args:
            file: what is staged.
            buffer: what ``buffer`` gave for it.
        """
        buffer[: len(file.layout.head)] = file.layout.head
        layout, targets = self._targets.get(file.name, (None, ()))
        if layout is not file.layout:
            targets = file.targets(buffer)
            self._targets[file.name] = (file.layout, targets)
        return targets

    def warm(self, sizes: Mapping[str, int]) -> None:
        """Get the memory for files of these names and lengths, and touch every page of it."""
        if not self.has_room(sizes):
            return
        for name, size_bytes in sizes.items():
            if name not in self._buffers:
                self.buffer(name, size_bytes)
                prefault(self._buffers[name])

    def lock(self, name: str) -> None:
        """Lock a file's memory for copies by a CUDA device; it stays locked while it is here."""
        # Only a process with a GPU pays for this.
        from resilient.state_dict.host_copy import lock_pages

        if name not in self._locked:
            self._locked[name] = lock_pages(self._buffers[name])

    def close(self) -> None:
        """Let go of all memory; nothing is in use."""
        for name in list(self._buffers):
            self._forget(name)
        self._buffers.clear()

    def _forget(self, name: str) -> None:
        """Keep nothing that points into the memory of a file."""
        self._targets.pop(name, None)
        self.splits.forget(name)
        self._unlock(name)

    def _unlock(self, name: str) -> None:
        address = self._locked.pop(name, 0)
        if address:
            from resilient.state_dict.host_copy import unlock_pages

            unlock_pages(address)
