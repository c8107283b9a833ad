"""Load of a checkpoint into live state, also if ranks or parallel layout differ from the save.

A rank reads a tensor as a whole if the tensor is not sharded in this run. If the tensor is sharded,
a rank reads only its own boxes (rectangular parts of the tensor), directly into its shard. No rank
therefore needs memory for the whole tensor. The load fills live tensors after all ranks have
verified the bytes that they read.

With ``in_place``, bytes are read directly into live tensors and verified there. Separate buffers
would double the memory, and the page faults in the new buffers would take most of the time. During
an in-place read, live tensors contain unverified bytes. If the checkpoint is damaged, live tensors
afterwards contain a mixture of old, new and damaged values. This mixture is harmless under three
conditions. Only tensors that meet all three conditions are read in place:

1. A later load overwrites the whole tensor. The tensor must belong to a part (a named object of a
   checkpoint, such as ``model``) that every checkpoint has. A load of this part must replace its
   whole state. Such parts are modules with a strict ``load_state_dict``, and optimizers. If a
   checkpoint is damaged, the load of an older checkpoint then overwrites all its bytes.
2. The checkpoint has exactly the tensors of the live part, with equal names, dtypes and shapes. The
   load checks this condition before it changes any memory. An intact checkpoint can therefore be
   loaded into the tensor.
3. No two of the tensors share memory.

If an in-place load finds no intact checkpoint, training must not continue. ``Checkpointer.resume``
then raises an error, and each later ``save`` raises an error too.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from resilient.errors import IncompatibleCheckpoint, IntegrityError, ResilientError, UnsavableState
from resilient.format.keys import rank_part
from resilient.format.partial_read import Content, stored_spans, view_of
from resilient.format.regions import ITEM_BYTES, Region, row_strides, whole
from resilient.format.state_json import tree_of
from resilient.state_dict.flatten import PLAIN, local_of, named_tensors, unflatten
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.sharding import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    FlatShard,
    LocalShard,
    read_targets,
)
from resilient.storage.transfer import MEMORY_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from resilient.format.manifest import Manifest, StoredRegion, TensorEntry
    from resilient.format.partial_read import Boxes, PlacesByFile, ReadTarget
    from resilient.state_dict.changes import ResumeCheck
    from resilient.state_dict.snapshot import Part

    Examine = Callable[[Mapping[str, Any]], None] | None

Berths = dict[str, torch.Tensor]
"""Live tensors by their stored names, which may be overwritten."""


def in_place_targets(parts: Mapping[str, Part]) -> dict[str, Berths]:
    """Return by part name the live tensors that may be filled before the part is loaded.

    The result omits parts whose tensors may not be read in place; these parts are loaded as usual.

    Crash: reads only.

    Args:
        parts: Parts to load into; their state is requested.
    """
    targets_by_part = {name: _live(name, part) for name, part in parts.items()}
    targets = {name: value for name, value in targets_by_part.items() if value}
    sharing = _sharing(targets)
    return {name: target for name, target in targets.items() if name not in sharing}


def matching_targets(targets: Mapping[str, Berths], manifest: Manifest) -> Berths:
    """Return the tensors of the parts whose stored layout equals the live layout.

    Args:
        targets: Live tensors by part.
        manifest: Manifest of the checkpoint to read.
    """
    stored_shapes: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
        name: {} for name in targets
    }
    for entry in manifest.tensors:
        if entry.part in stored_shapes:
            stored_shapes[entry.part][entry.name] = (entry.dtype, entry.shape)
    return {
        path: tensor
        for name, live in targets.items()
        if stored_shapes[name]
        == {
            path: (DTYPE_NAMES.get(value.dtype), tuple(value.shape)) for path, value in live.items()
        }
        for path, tensor in live.items()
    }


def _live(name: str, part: Part) -> Berths | None:
    """Return all tensors of a part, tied tensors once; None if an in-place read is not allowed."""
    if part.optional or part.document or part.scope != "replicated":
        return None
    state = _whole_state(part.stateful)
    if state is None:
        return None
    targets: Berths = {}
    keys: set[tuple[Any, ...]] = set()
    for path, tensor in named_tensors(state, name):
        memory = _memory(tensor, path)
        if memory is None:
            return None
        key = (memory.data_ptr(), tensor.dtype, tensor.shape, memory.stride())
        if not tensor.numel() or key not in keys:
            targets[path] = tensor
            keys.add(key)
    return targets


def _whole_state(stateful: Any) -> Any:
    """Return the state of an object whose load replaces its whole state."""
    if isinstance(stateful, NamedOptimizer):
        return stateful.state_dict()
    kind = type(stateful)
    if not isinstance(stateful, nn.Module) or (
        kind.load_state_dict is not nn.Module.load_state_dict
        or kind.state_dict is not nn.Module.state_dict
    ):
        return None
    return dict(stateful.state_dict(keep_vars=True))


def _memory(tensor: torch.Tensor, path: str) -> torch.Tensor | None:
    """Return the host memory of a tensor if bytes can be read into it unchanged."""
    if type(tensor) not in PLAIN and not hasattr(tensor, "to_local"):
        return None
    try:
        memory = local_of(tensor, path)
    except UnsavableState:
        return None
    is_plain = memory.device.type == "cpu" and memory.layout == torch.strided
    if not is_plain or memory.is_conj() or memory.is_neg():
        return None
    return memory if memory.is_contiguous() else None


def _sharing(targets: Mapping[str, Berths]) -> set[str]:
    """Return the parts with a tensor that shares memory with another tensor."""
    sharing_parts: set[str] = set()
    furthest, owner = 0, ""
    for start, stop, part in sorted(_spans(targets)):
        if start < furthest:
            sharing_parts |= {part, owner}
        if stop > furthest:
            furthest, owner = stop, part
    return sharing_parts


def _spans(targets: Mapping[str, Berths]) -> Iterable[tuple[int, int, str]]:
    for name, live in targets.items():
        for path, tensor in live.items():
            memory = local_of(tensor, path)
            if memory.numel():
                yield memory.data_ptr(), memory.data_ptr() + memory.nbytes, name


IN_PLACE_BYTES_MIN = 64 << 10
"""Minimum size of a tensor for an in-place read; a separate read of a smaller tensor is slower."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTarget:
    """A tensor to fill, and this rank's boxes of it."""

    tensor: torch.Tensor
    boxes: tuple[LocalShard, ...]


class LoadPlan:
    """Live tensors to fill, by their stored names.

    The live tensors come from a part's state. A part may have no state before the load, such as an
    optimizer before its first step. Such a part has a method ``like(path)``. ``like`` returns a
    tensor with the layout of the future tensor at ``path`` of the part, or None. If the result is a
    FlatShard, the load fills it directly.

    Args:
        parts: Parts to load into. The constructor calls their ``state_dict``, so all ranks must
            construct a plan.
        in_place: Whether ``places`` returns live memory. Live memory contains unverified bytes
            during a read, and no saved state after a failed read.
    """

    def __init__(self, parts: Mapping[str, Part], *, in_place: bool = False) -> None:
        self._parts = parts
        self._targets = in_place_targets(parts) if in_place else {}
        self._filled_targets: Berths = {}
        self._live: dict[str, torch.Tensor] = {}
        # Without a process group, no tensor is sharded over ranks.
        self._together = dist.is_available() and dist.is_initialized()
        if not self._together:
            return
        for name, part in parts.items():
            if _may_be_sharded(part) and not hasattr(part.stateful, "like"):
                tensors = named_tensors(dict(part.stateful.state_dict()), name)
                self._live |= {
                    path: tensor for path, tensor in tensors if type(tensor) not in PLAIN
                }

    def boxes(self, manifest: Manifest) -> Boxes:
        """Return this rank's boxes of the tensors that are sharded here.

        Raises:
            IncompatibleCheckpoint: A tensor is stored with another shape.
        """
        self._filled_targets = matching_targets(self._targets, manifest)
        boxes: Boxes = {}
        for entry in manifest.tensors:
            like = self._filled_targets.get(entry.name)
            like = self._like(entry) if like is None else like
            if like is not None and type(like) not in PLAIN:
                boxes[entry.name] = tuple(box.region for box in _boxes_of(like))
        return boxes

    def places(self, manifest: Manifest) -> PlacesByFile:
        """Return the live memory that large tensors of a checkpoint are read into.

        Until the next call, ``target_for`` returns the live tensors of the matching parts.
        """
        self._filled_targets = matching_targets(self._targets, manifest)
        targets: dict[str, list[ReadTarget]] = defaultdict(list)
        for entry in manifest.tensors:
            live = self._filled_targets.get(entry.name)
            if live is not None and live.nbytes >= IN_PLACE_BYTES_MIN:
                for file, place in read_targets(entry, _boxes_of(live)):
                    targets[file].append(place)
        overlapping_files = _files_with_overlaps(manifest, targets)
        return {
            file: sorted(places, key=lambda place: place.start)
            for file, places in targets.items()
            if file not in overlapping_files
        }

    def target_for(self, entry: TensorEntry) -> LoadTarget | None:
        """Return the target of a stored tensor; None for a tensor that is read as a whole.

        The target is the live tensor itself. If the live tensor does not exist yet or has another
        dtype, the target is a new tensor with the same layout.
        """
        live = self._filled_targets.get(entry.name)
        if live is not None:
            return LoadTarget(live, _boxes_of(live))
        like = self._like(entry)
        if like is None:
            return None
        dtype = TORCH_DTYPES[entry.dtype]
        is_there = entry.name in self._live or isinstance(like, FlatShard)
        if not is_there or like.dtype != dtype:
            like = torch.empty_like(like.detach(), dtype=dtype)
        return LoadTarget(like, _boxes_of(like))

    def _like(self, entry: TensorEntry) -> torch.Tensor | None:
        """Return the live sharded tensor that has the layout of a stored one."""
        live = self._live.get(entry.name)
        if live is not None:
            if tuple(live.shape) != entry.shape:
                raise IncompatibleCheckpoint(
                    f"`{entry.name}` has shape {list(entry.shape)} in the checkpoint and "
                    f"{list(live.shape)} here",
                    hint="resume with the model that was saved, or start with --resume never",
                )
            return live
        part = self._parts.get(entry.part) if self._together else None
        ask = getattr(part.stateful, "like", None) if part is not None else None
        live_value = ask(entry.name.removeprefix(f"{entry.part}/")) if ask is not None else None
        if (
            live_value is None
            or type(live_value) in PLAIN
            or tuple(live_value.shape) != entry.shape
        ):
            return None
        return live_value  # type: ignore[no-any-return]  # what a Stateful of anyone returns


def _may_be_sharded(part: Part) -> bool:
    return part.scope == "replicated" and not part.document


def _files_with_overlaps(manifest: Manifest, files: Collection[str]) -> set[str]:
    """Return the files with overlapping regions, which only a foreign writer can produce."""
    spans: dict[str, list[tuple[int, int]]] = {file: [] for file in files}
    for entry in manifest.tensors:
        for region in entry.regions:
            if region.file in spans and region.size_bytes:
                spans[region.file].append((region.start, region.start + region.size_bytes))
    return {
        file
        for file, file_spans in spans.items()
        if any(first[1] > second[0] for first, second in pairwise(sorted(file_spans)))
    }


def _boxes_of(tensor: torch.Tensor) -> tuple[LocalShard, ...]:
    if type(tensor) in PLAIN:
        return (LocalShard(whole(tensor.shape), tensor.detach()),)
    # Import inside the function, because only sharded training needs the slow import of DTensor.
    from resilient.state_dict.sharding import local_shards

    return local_shards(tensor)


def stored_name(name: str, part: Part, rank: int) -> str:
    """Return the stored name of this rank's copy of a part."""
    return rank_part(name, rank) if part.scope == "rank" else name


def absent_parts(manifest: Manifest, parts: Mapping[str, Part], rank: int) -> tuple[str, ...]:
    """Return the parts that the checkpoint does not have for this rank.

    Raises:
        IncompatibleCheckpoint: A missing part is neither optional nor per-rank. Without the error,
            this part would silently start from its initial state.
    """
    stored_names = {entry.name for entry in manifest.parts}
    absent_names = tuple(
        name for name, part in parts.items() if stored_name(name, part, rank) not in stored_names
    )
    for name in absent_names:
        if parts[name].scope == "replicated" and not parts[name].optional:
            raise IncompatibleCheckpoint(
                f"{manifest.checkpoint} holds no `{name}`, so this part would start from its "
                "initial state",
                hint="resume with the configuration that was saved, or start with --resume never",
            )
    return absent_names


_VIEW_BYTES_MIN = 64 << 10
_WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_TORCH_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def load_present_parts(
    manifest: Manifest,
    files: Mapping[str, Content],
    parts: Mapping[str, Part],
    rank: int,
    landing: LoadPlan,
    check: ResumeCheck,
) -> tuple[str, ...]:
    """Load the parts of a checkpoint; return the optional parts that are missing.

    Args:
        manifest: Manifest of the checkpoint.
        files: As for ``load``.
        parts: As for ``load``.
        rank: Rank of this process.
        landing: As for ``load``.
        check: Comparison of the saved run with this run before anything is loaded.
    """
    if check.examine is not None:
        check.examine(manifest.config)
    absent_names = absent_parts(manifest, parts, rank)
    fresh_names = load(manifest, files, parts, rank, landing, check)
    return (*absent_names, *fresh_names)


def load(
    manifest: Manifest,
    files: Mapping[str, Content],
    parts: Mapping[str, Part],
    rank: int,
    landing: LoadPlan | None = None,
    check: ResumeCheck | None = None,
) -> tuple[str, ...]:
    """Load the state of every part of the checkpoint, in the order of ``parts``.

    A part may have a method ``check_saved(state_dict)``. The load calls this method of every part
    before it loads the first part. The method gets tensors of zeros that need no memory.

    Crash: only this process's memory changed.

    Args:
        manifest: Manifest of the checkpoint.
        files: Verified content by file name, with all bytes of the parts that ``landing`` needs.
        parts: Parts to load into; parts that the checkpoint lacks are not changed.
        rank: Rank whose copies of per-rank parts are loaded.
        landing: Load plan of sharded tensors; computed from ``parts`` by default.
        check: Comparison of the saved state with the live objects before the first load.

    Returns:
        Parts that ``check`` leaves unchanged.

    Raises:
        IncompatibleCheckpoint: A part refuses the state, for example another shape.
        IntegrityError: A document is not valid in a checkpoint.
    """
    landing = landing or LoadPlan(parts)
    entries = {entry.name: entry for entry in manifest.parts}
    tensors = {entry.name: entry for entry in manifest.tensors}
    trees: dict[str, Any] = {}
    for name, part in parts.items():
        entry = entries.get(stored_name(name, part, rank))
        if entry is None:
            continue
        content = files[entry.document]
        trees[name] = tree_of(entry, view_of(content, 0, len(content)).tobytes(), part.rows)
    fresh_names = check.fresh_parts(manifest, trees, parts) if check is not None else frozenset()
    for name in list(trees):
        part = parts[name]
        if name in fresh_names:
            del trees[name]
        elif hasattr(part.stateful, "check_saved"):
            outline = unflatten(trees[name], partial(_outline, tensors))
            with _name_part_in_errors(name, manifest):
                part.stateful.check_saved(outline)
    for name in list(trees):
        state = unflatten(trees.pop(name), _Reader(tensors, files, landing))
        with _name_part_in_errors(name, manifest):
            parts[name].stateful.load_state_dict(state)
    return tuple(fresh_names)


def _outline(entries: Mapping[str, TensorEntry], name: str) -> torch.Tensor:
    """Return a zero tensor with a stored dtype and shape, in memory for one element."""
    if name not in entries:
        raise IntegrityError(
            f"a checkpoint's state names `{name}`, which the checkpoint does not hold"
        )
    entry = entries[name]
    return torch.zeros((), dtype=TORCH_DTYPES[entry.dtype]).expand(entry.shape)


@contextmanager
def _name_part_in_errors(name: str, manifest: Manifest) -> Iterator[None]:
    """Name the part and the checkpoint in the error of a refused load."""
    try:
        yield
    except ResilientError:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise IncompatibleCheckpoint(
            f"`{name}` cannot load its state from {manifest.checkpoint}: {error}",
            hint=f"resilient ckpt inspect {manifest.checkpoint} --tensors",
        ) from error


class _Reader:
    """Reader that creates each tensor once, so that tied tensors stay one object."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        files: Mapping[str, Content],
        landing: LoadPlan,
    ) -> None:
        self._entries = entries
        self._files = files
        self._landing = landing
        self._tensors: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            raise IntegrityError(
                f"a checkpoint's state names `{name}`, which the checkpoint does not hold"
            )
        if name not in self._tensors:
            self._tensors[name] = self._make(self._entries[name])
        return self._tensors[name]

    def _make(self, entry: TensorEntry) -> torch.Tensor:
        buffer = self._landing.target_for(entry)
        if buffer is None:
            return assemble(entry, self._files)
        for box in buffer.boxes:
            _fill(box, entry, self._files)
        return buffer.tensor


def assemble(entry: TensorEntry, files: Mapping[str, Content]) -> torch.Tensor:
    """Return a whole tensor on the CPU, assembled from its stored regions.

    If a large tensor is stored in one piece, the result uses the memory of its file.

    Args:
        entry: Manifest entry with the places of the regions.
        files: Verified content by file name.
    """
    in_place_view = _view_in_place(entry, files)
    if in_place_view is not None:
        return in_place_view
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    _fill(LocalShard(whole(entry.shape), tensor), entry, files)
    return tensor


def _view_in_place(entry: TensorEntry, files: Mapping[str, Content]) -> torch.Tensor | None:
    """Return a tensor that uses the memory of its file; None if not possible.

    The memory must have torch's alignment. torch may choose another kernel for another alignment,
    which can change the last bits of a sum.
    """
    stored_region = entry.regions[0] if len(entry.regions) == 1 else None
    if stored_region is None or stored_region.size_bytes < _VIEW_BYTES_MIN:
        return None
    view = view_of(files[stored_region.file], stored_region.start, stored_region.size_bytes)
    if view.readonly or not stored_region.region.is_whole(entry.shape):
        return None
    tensor = torch.frombuffer(view, dtype=TORCH_DTYPES[entry.dtype]).view(entry.shape)
    return None if tensor.data_ptr() % MEMORY_ALIGNMENT else tensor


def _fill(box: LocalShard, entry: TensorEntry, files: Mapping[str, Content]) -> None:
    """Copy a box of a stored tensor into memory, from any stored regions.

    Bytes that were read directly into this memory are not copied.

    Args:
        box: Box on any device, with any strides, of the stored dtype.
        entry: Manifest entry with the places of the regions.
        files: Verified content by file name.
    """
    item = ITEM_BYTES[entry.dtype]
    for stored_region in entry.regions:
        for part, start, length in stored_spans(stored_region, box.region, item):
            words = np.frombuffer(view_of(files[stored_region.file], start, length), _WORDS[item])
            data = box.data if part == box.region else box.part(part)
            if words.ctypes.data != data.data_ptr():
                _copy_words(data, _strided(words, stored_region, part))


def _strided(words: np.ndarray[Any, Any], stored: StoredRegion, part: Region) -> Any:
    """Return ``part`` of a stored region; ``words`` are the bytes from its first element on."""
    strides = [step * words.itemsize for step in row_strides(stored.region.lengths)]
    return np.lib.stride_tricks.as_strided(words, part.lengths, strides, writeable=False)


def _copy_words(target: torch.Tensor, words: Any) -> None:
    """Copy bits into a tensor whose elements are as wide as the words."""
    host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    # NumPy lacks some dtypes of torch, so the copy uses integers of the same width.
    np.copyto(host.view(_TORCH_WORDS[words.itemsize]).numpy(), words)
    if host is not target:
        target.copy_(host)
