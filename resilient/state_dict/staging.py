"""Copy of a snapshot into host buffers (staging), partly at once and partly during training.

A snapshot is the named state of all saved objects of a rank, which shares memory with training.

Tensors that only an optimizer step changes can be copied later, during training. Buffers and copy
plans stay allocated between saves, because the first use of fresh pages costs several times the
copy.
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
from resilient.state_dict.save_planner import SavePlanner, document_to_json, own_file, tree_to_json
from resilient.state_dict.sharding import DTYPE_NAMES
from resilient.storage.shared_memory import PrivateBuffers, prefault

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from resilient.distributed.launch_env import World
    from resilient.format.safetensors_file import FileLayout, StreamedFile
    from resilient.state_dict.host_copy import PendingCopy
    from resilient.state_dict.save_planner import PlannedFile
    from resilient.state_dict.snapshot import FlattenedPart, Part, Snapshot

# The copy of a smaller tensor is faster than its tracking. Some models also clamp a small parameter
# in a forward pass.
_LATER_BYTES_MIN = 64 << 10
_KINDS = frozenset(PLAIN)
_DICTS = frozenset({dict})
_values_of = methodcaller("values")


def stable_storages(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that only an optimizer's step changes.

    Stable storages contain the parameters and the state of the optimizers among the parts. A
    forward pass may change all other memory, such as buffers of BatchNorm, random state, and
    parameters without a saved optimizer. A part can have a method ``steady()`` that yields its
    stable tensors.
    """
    return _addresses(tensor for part in parts.values() for tensor in _steady(part.stateful))


def state_memory(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that contain only state of torch's optimizers.

    A model's forward pass has no access to these storages. In contrast, a model may clamp one of
    its own parameters. Optimizer state that shares memory with a parameter is left out.
    """
    optimizers = [*filter(None, (_optimizer_of(part.stateful) for part in parts.values()))]
    state_addresses = _addresses(
        tensor for optimizer in optimizers for tensor in _state_tensors(optimizer)
    )
    return state_addresses - _addresses(
        parameter for optimizer in optimizers for parameter in _parameters(optimizer)
    )


class StableStorageCache:
    """Cache of the stable storages while optimizers keep their memory.

    A search through all optimizer state at each step would be slow.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._alive: list[Any] = []
        self._storages = frozenset[int](), frozenset[int]()

    def of(
        self, parts: Mapping[str, Part], snapshot: Snapshot
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return the results of :func:`stable_storages` and :func:`state_memory`.

        Args:
            parts: Parts by name.
            snapshot: Current snapshot of these parts.
        """
        pairs = [*zip(parts.values(), (part.tensors for part in snapshot.parts), strict=True)]
        layout = [_layout_of(part.stateful, tensors) for part, tensors in pairs]
        if None in layout or layout != self._layout:
            self._storages = stable_storages(parts), state_memory(parts)
            # The id of an object is unique only during the lifetime of the object.
            self._layout, self._alive = layout, [tensors for _, tensors in pairs]
        return self._storages


def is_deferrable(
    source: torch.Tensor, steady: Collection[int], small: Collection[int] = frozenset()
) -> bool:
    """Return whether a tensor is copied later, while training continues.

    Args:
        source: Tensor to copy.
        steady: Addresses of storages that do not change for a while.
        small: Addresses of storages whose tensors are deferred at any size.
    """
    address = address_of(source)
    return address in steady and (source.nbytes >= _LATER_BYTES_MIN or address in small)


def _addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    distinct = [*tensors]
    if _KINDS.issuperset(map(type, distinct)) and not any(
        map(torch.Tensor.storage_offset, distinct)
    ):
        # Such a tensor begins at the start of its storage, and `data_ptr()` is faster than
        # `untyped_storage()`.
        return frozenset(map(torch.Tensor.data_ptr, distinct))
    return frozenset(map(address_of, distinct))


def _steady(stateful: Any) -> Iterable[torch.Tensor]:
    if _has_steady_method(stateful):
        return stateful.steady()  # type: ignore[no-any-return]  # what a Stateful of anyone returns
    optimizer = _optimizer_of(stateful)
    return _tensors_of_optimizer(optimizer) if optimizer is not None else ()


def _has_steady_method(stateful: Any) -> bool:
    # A method `steady` of a user's module or optimizer has another meaning.
    is_torchs = isinstance(stateful, torch.nn.Module | torch.optim.Optimizer)
    return not is_torchs and callable(getattr(type(stateful), "steady", None))


def _layout_of(stateful: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...] | None:
    """Return the memory layout of an optimizer; None if unknown.

    Args:
        stateful: Any stateful.
        tensors: Tensors of its current state.
    """
    if _has_steady_method(stateful):
        return None
    optimizer = _optimizer_of(stateful)
    if optimizer is None:
        return ()
    parameters = _parameters(optimizer)
    if not isinstance(tensors, CachedTensors) or not _KINDS.issuperset(map(type, parameters)):
        return None
    return id(tensors), [*map(torch.Tensor.data_ptr, chain(parameters, tensors.values()))]


def _optimizer_of(stateful: Any) -> torch.optim.Optimizer | None:
    optimizer = stateful.optimizer if isinstance(stateful, NamedOptimizer) else stateful
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage of a tensor on this rank; 0 if it has none."""
    if type(tensor) in PLAIN:
        return tensor.untyped_storage().data_ptr()
    # Import inside the function, because only sharded training needs the slow import of DTensor.
    from resilient.state_dict.sharding import is_sharded, local_memory

    return local_memory(tensor).untyped_storage().data_ptr() if is_sharded(tensor) else 0


def _tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return _parameters(optimizer) + _state_tensors(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [*optimizer.state.values()]
    # The state is usually one dict per parameter, but torch also saves other values.
    dicts = states if _DICTS.issuperset(map(type, states)) else [*map(_dict_of, states)]
    values = [*chain.from_iterable(map(_values_of, dicts))]
    if _KINDS.issuperset(map(type, values)):
        return values
    return [value for value in values if isinstance(value, torch.Tensor)]


def _dict_of(state: Any) -> dict[Any, Any]:
    return state if isinstance(state, dict) else {"": state}


@dataclass(frozen=True, slots=True)
class StagedSnapshot:
    """One rank's files in host memory, and the parts of their documents.

    Attributes:
        files: Files, complete after ``rest`` is made.
        parts: Parts whose documents are among the files.
        rest: Deferred copies.
        streamed: Files that do not fit in memory. The live state must not change until these files
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

    After this function returns, the live state may change, except for storages in ``steady``. These
    storages may change after the copies in ``rest`` of the result are made. At most one
    StagedSnapshot of an arena may be in use.

    If the files do not fit in the arena, nothing is copied and the files are streamed.

    Collective: every rank, same step; the ranks do not communicate.
    Crash: nothing was stored; the checkpoint does not exist.

    Args:
        snapshot: State of this rank; tensors on any device, with any strides.
        world: Identity of this rank; a replicated part is split evenly over its size.
        arena: Buffers, with the layouts of earlier stagings.
        steady: Addresses of storages that do not change until ``rest`` is made.
        small: Addresses in ``steady`` whose tensors are left to ``rest`` at any size.

    Returns:
        One safetensors file per part with tensors to write, or several for a large part; on the
        coordinator also the documents.
    """
    files = arena.drafts.of(snapshot, world)
    documents, parts = _stage_documents(snapshot, world)
    sizes = {file.name: file.layout.size_bytes for file in files}
    if not arena.has_room(sizes | {document.name: document.size_bytes for document in documents}):
        return StagedSnapshot(
            tuple(documents), parts, DeferredCopies(), tuple(file.streamed() for file in files)
        )
    buffers = [arena.buffer(file.name, file.layout.size_bytes) for file in files]
    pending_copies: list[PendingCopy] = []
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for file, buffer in zip(files, buffers, strict=True):
        split = arena.splits.of(file, arena.targets(file, buffer), steady, small)
        pending_copies += split.waiting
        if split.on_device:
            pending_copies.append(_begin(split.on_device, file.name, arena))
        sources += split.sources
        targets += split.targets
    copy_all(sources, targets)
    filled = [
        StagedFile(file.name, buffer, file.entries)
        for file, buffer in zip(files, buffers, strict=True)
    ]
    return StagedSnapshot((*filled, *documents), parts, DeferredCopies(pending_copies))


def draft(snapshot: Snapshot, world: World) -> list[PlannedFile]:
    """Return the planned files for this rank's tensors of a snapshot; nothing is copied."""
    return SavePlanner().of(snapshot, world)


def _begin(copies: list[TensorCopy], file: str, arena: StagingBuffers) -> PendingCopy:
    """Start the copies of a device into a file."""
    # Only a process with a GPU pays for this import.
    from resilient.state_dict.host_copy import DeviceCopies

    arena.lock(file)
    return DeviceCopies(copies)


def _stage_documents(
    snapshot: Snapshot, world: World
) -> tuple[list[StagedFile], tuple[PartEntry, ...]]:
    """Return the documents that this rank writes, and their parts."""
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
        tensors: Tensors by name, on any device, with any strides.
        metadata: Strings for the file's header.

    Raises:
        UnsavableState: safetensors does not support the dtype of a tensor.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsavableState(
                f"`{name}` is {tensor.dtype}, which cannot be staged there", path=name
            )
    layout = compute_layout(
        [
            TensorSlot(name, DTYPE_NAMES[content.dtype], tuple(content.shape))
            for name, content in tensors.items()
        ],
        metadata,
    )
    buffer = memoryview(bytearray(layout.size_bytes))
    buffer[: len(layout.head)] = layout.head
    for name, tensor in tensors.items():
        target_in(buffer, layout.starts[name], tensor).copy_(tensor.detach())
    return buffer


def _documents(parts: Sequence[FlattenedPart]) -> list[StagedFile]:
    """Return ``state.json`` and the parts' own documents."""
    shared_trees = {part.name: part.tree for part in parts if not part.document}
    own_documents = [
        StagedFile(part.document, document_to_json(part.tree).encode())
        for part in parts
        if part.document
    ]
    return [StagedFile(STATE_DOCUMENT, tree_to_json(shared_trees).encode() + b"\n"), *own_documents]


_TOGETHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class CopySchedule:
    """The copies that fill one file.

    Attributes:
        steady: Addresses of the storages that can wait.
        small: Addresses in ``steady`` whose tensors can wait at any size.
        waiting: Copies within host memory that can wait, small ones in batches.
        on_device: Copies from a device that can wait.
        sources: Tensors that cannot wait.
        targets: Target of each source.
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
        """Return the copies of a file; copies from ``steady`` storages wait."""
        pending_copies: list[TensorCopy] = []
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for entry, source, target in zip(file.entries, file.sources, into, strict=True):
            if is_deferrable(source, steady, small):
                pending_copies.append(TensorCopy(entry.name, source, target))
            else:
                sources.append(source)
                targets.append(target)
        batches = [
            *map(
                HostCopyBatch, _together(copy for copy in pending_copies if not copy.source.is_cuda)
            )
        ]
        on_device = [copy for copy in pending_copies if copy.source.is_cuda]
        return cls(steady, small, batches, on_device, sources, targets)


def _together(copies: Iterable[TensorCopy]) -> Iterator[list[TensorCopy]]:
    """Yield copies, with small copies joined into batches, which are cheaper to track."""
    batch: list[TensorCopy] = []
    size_bytes = 0
    for copy in copies:
        batch.append(copy)
        size_bytes += copy.source.nbytes
        if size_bytes >= _TOGETHER_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


class CopyScheduleCache:
    """Cache of the copy schedules of planned files while the files are referenced."""

    def __init__(self) -> None:
        self._schedules: WeakKeyDictionary[PlannedFile, CopySchedule] = WeakKeyDictionary()

    def of(
        self,
        file: PlannedFile,
        into: Sequence[torch.Tensor],
        steady: Collection[int],
        small: Collection[int] = frozenset(),
    ) -> CopySchedule:
        """Return the copies of a file; all earlier copies of this file must have ended.

        Args:
            file: File to stage.
            into: Targets of the sources; the same memory until ``forget`` is called.
            steady: Addresses of storages that do not change for a while.
            small: Addresses in ``steady`` whose tensors wait at any size.
        """
        schedule = self._schedules.get(file)
        if schedule is None or (schedule.steady, schedule.small) != (steady, small):
            schedule = self._schedules[file] = CopySchedule.of(file, into, steady, small)
            return schedule
        for copy in schedule.waiting:
            copy.renew()
        return schedule

    def forget(self, name: str) -> None:
        """Drop all references to the memory of a file of this name."""
        for file in [planned_file for planned_file in self._schedules if planned_file.name == name]:
            del self._schedules[file]


def has_idle_core(ranks: int, cores: float) -> bool:
    """Return whether copies can run during training on an idle core.

    Args:
        ranks: Number of ranks of this host; each rank computes with as many threads as this rank.
        cores: Number of cores that these ranks may use.
    """
    # Work on a device leaves the host's cores idle, and a device copies asynchronously.
    has_device = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return has_device or ranks * torch.get_num_threads() < cores


class StagingBuffers:
    """Host buffers by the name of the staged file.

    Args:
        allocate: Function that returns at least the requested bytes for a file of this name, if
            possible the memory of the last call. The default allocates private memory.
        streams: Predicate on the names and lengths of files, true if the files do not fit. The
            default is always false.

    Attributes:
        drafts: Last layouts of the staged files.
        splits: Last copy schedules of the staged files.
    """

    def __init__(
        self,
        allocate: Callable[[str, int], memoryview] | None = None,
        streams: Callable[[Mapping[str, int]], bool] | None = None,
    ) -> None:
        self._streams = streams or (lambda _: False)
        self._allocate = allocate or PrivateBuffers().get
        self._buffers: dict[str, memoryview] = {}
        self._locked_bytes: dict[str, int] = {}
        self._targets: dict[str, tuple[FileLayout, tuple[torch.Tensor, ...]]] = {}
        self.drafts = SavePlanner()
        self.splits = CopyScheduleCache()

    def has_room(self, sizes: Mapping[str, int]) -> bool:
        """Return whether files of these names and lengths can be staged; release all other buffers.

        Raises:
            ConfigError: Memory does not suffice even to stream the files.
        """
        streams = self._streams(sizes)
        for name in [buffer for buffer in self._buffers if streams or buffer not in sizes]:
            self._forget(name)
            del self._buffers[name]
        return not streams

    def buffer(self, name: str, size_bytes: int) -> memoryview:
        """Return ``size_bytes`` of memory for a file."""
        allocated = self._allocate(name, size_bytes)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.obj is not allocated.obj:
            self._forget(name)
            self._buffers[name] = memoryview(allocated.obj)
        return allocated[:size_bytes]

    def targets(self, file: PlannedFile, buffer: memoryview) -> tuple[torch.Tensor, ...]:
        """Return the targets of a file's sources in its memory, and write its header there.

        Args:
            file: File to stage.
            buffer: Memory from ``buffer`` for the file.
        """
        buffer[: len(file.layout.head)] = file.layout.head
        layout, targets = self._targets.get(file.name, (None, ()))
        if layout is not file.layout:
            targets = file.destinations(buffer)
            self._targets[file.name] = (file.layout, targets)
        return targets

    def warm(self, sizes: Mapping[str, int]) -> None:
        """Allocate the memory for files of these names and lengths, and touch every page of it."""
        if not self.has_room(sizes):
            return
        for name, size_bytes in sizes.items():
            if name not in self._buffers:
                self.buffer(name, size_bytes)
                prefault(self._buffers[name])

    def lock(self, name: str) -> None:
        """Lock a file's memory for copies by a CUDA device; it stays locked until released."""
        # Only a process with a GPU pays for this import.
        from resilient.state_dict.host_copy import lock_pages

        if name not in self._locked_bytes:
            self._locked_bytes[name] = lock_pages(self._buffers[name])

    def close(self) -> None:
        """Release all memory, which must not be in use."""
        for name in list(self._buffers):
            self._forget(name)
        self._buffers.clear()

    def _forget(self, name: str) -> None:
        """Drop all references to the memory of a file."""
        self._targets.pop(name, None)
        self.splits.forget(name)
        self._unlock(name)

    def _unlock(self, name: str) -> None:
        address = self._locked_bytes.pop(name, 0)
        if address:
            from resilient.state_dict.host_copy import unlock_pages

            unlock_pages(address)
