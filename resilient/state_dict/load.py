"""Read proved bytes into live state, in place, any layout.

Live tensors that a checkpoint may be read straight into, before all of it is proved.

Reading into memory of its own and copying from there takes twice the memory, and most of the time
of a load is then spent on pages that nobody touched before. What is read in place is proved where
it lies. So while a checkpoint is read, live tensors hold bytes of it that nobody has proved, and
if it turns out damaged they hold a mixture. That does no harm under three conditions, and only
tensors for which all three hold are here:

1. Whatever is loaded next overwrites all of it. The part is one that every checkpoint must hold,
   and takes its state as a whole: a module, whose ``load_state_dict`` is strict, or an optimizer,
   which replaces its state. So an older checkpoint leaves nothing behind of a damaged one.
2. It is loaded from this checkpoint if the checkpoint is whole: every tensor of the part has its
   name, dtype and shape there, and the checkpoint holds no other of this part. What can be known
   not to fit is found before anything is touched.
3. No two of them share memory.

Who reads in place and finds nothing whole must not go on: ``Checkpointer.resume`` raises, and its
``save`` refuses.

Where stored tensors land that are sharded here: which boxes to read, and what to fill.

A plain tensor is wanted whole. For a tensor that is spread over the ranks of the live state, only
this rank's boxes are wanted, and they come straight into its memory: no rank ever holds such a
tensor whole, whatever layout it was stored in.

Live tensors are filled when all ranks have proved what they read; with ``in_place`` those of
:mod:`resilient.state_dict.load` are read into, and proved where they lie.

Proved bytes to parts: the way back, in place, from any world size and any layout.
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
"""Live tensors by the names under which they are stored, which may be overwritten."""


def in_place_targets(parts: Mapping[str, Part]) -> dict[str, Berths]:
    """Return by part name the live tensors that may be filled before the part is loaded.

    Parts that tensors may not be read into in place are left out, and are loaded as ever.

    Crash: reads only.

    Args:
        parts: what will be loaded into; asked for their state.
    """
    found = {name: _live(name, part) for name, part in parts.items()}
    berths = {name: one for name, one in found.items() if one}
    sharing = _sharing(berths)
    return {name: one for name, one in berths.items() if name not in sharing}


def matching_targets(berths: Mapping[str, Berths], manifest: Manifest) -> Berths:
    """Return those tensors whose parts are stored just as they are here.

    Args:
        berths: by part.
        manifest: of the checkpoint that will be read.
    """
    stored: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {name: {} for name in berths}
    for entry in manifest.tensors:
        if entry.part in stored:
            stored[entry.part][entry.name] = (entry.dtype, entry.shape)
    return {
        path: tensor
        for name, live in berths.items()
        if stored[name]
        == {path: (DTYPE_NAMES.get(one.dtype), tuple(one.shape)) for path, one in live.items()}
        for path, tensor in live.items()
    }


def _live(name: str, part: Part) -> Berths | None:
    """Return all tensors of a part, tied ones once; None if it is not to be filled in place."""
    if part.optional or part.document or part.scope != "replicated":
        return None
    state = _whole_state(part.stateful)
    if state is None:
        return None
    found: Berths = {}
    known: set[tuple[Any, ...]] = set()
    for path, tensor in named_tensors(state, name):
        memory = _memory(tensor, path)
        if memory is None:
            return None
        key = (memory.data_ptr(), tensor.dtype, tensor.shape, memory.stride())
        if not tensor.numel() or key not in known:
            found[path] = tensor
            known.add(key)
    return found


def _whole_state(stateful: Any) -> Any:
    """Return the state of what takes a state as a whole, with the very tensors that it holds."""
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
    """Return the host memory of a tensor if bytes can be read into it as they lie."""
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


def _sharing(berths: Mapping[str, Berths]) -> set[str]:
    """Return the parts of which a tensor shares memory with another one."""
    found: set[str] = set()
    furthest, whose = 0, ""
    for start, stop, part in sorted(_spans(berths)):
        if start < furthest:
            found |= {part, whose}
        if stop > furthest:
            furthest, whose = stop, part
    return found


def _spans(berths: Mapping[str, Berths]) -> Iterable[tuple[int, int, str]]:
    for name, live in berths.items():
        for path, tensor in live.items():
            memory = local_of(tensor, path)
            if memory.numel():
                yield memory.data_ptr(), memory.data_ptr() + memory.nbytes, name


IN_PLACE_BYTES_MIN = 64 << 10
"""A smaller tensor is copied: its piece of a read would cost more than that."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadTarget:
    """A tensor to fill, and this rank's boxes of it."""

    tensor: torch.Tensor
    boxes: tuple[LocalShard, ...]


class LoadPlan:
    """The tensors of live parts to fill, by the names under which they are stored.

    A part's state says where its tensors are. A part that has no state before it is loaded, as an
    optimizer before its first step, says it by a method ``like(path)`` instead: it returns a tensor
    of the layout that the one at ``path`` of the part will have, or None. A FlatShard that it
    returns is filled itself.

    Args:
        parts: what will be loaded into; asked for their state here, so on all ranks alike.
        in_place: ``places`` names live memory, which then holds what nobody has proved while a
            checkpoint is read, and no state that was ever saved if that fails.
    """

    def __init__(self, parts: Mapping[str, Part], *, in_place: bool = False) -> None:
        self._parts = parts
        self._berths = in_place_targets(parts) if in_place else {}
        self._berthed: Berths = {}
        self._live: dict[str, torch.Tensor] = {}
        # Without a process group nothing can be spread over ranks.
        self._together = dist.is_available() and dist.is_initialized()
        if not self._together:
            return
        for name, part in parts.items():
            if _may_be_sharded(part) and not hasattr(part.stateful, "like"):
                tensors = named_tensors(dict(part.stateful.state_dict()), name)
                self._live |= {path: one for path, one in tensors if type(one) not in PLAIN}

    def boxes(self, manifest: Manifest) -> Boxes:
        """Return the boxes that this rank wants of the tensors that are sharded here.

        Raises:
            IncompatibleCheckpoint: a tensor is stored with another shape.
        """
        self._berthed = matching_targets(self._berths, manifest)
        boxes: Boxes = {}
        for entry in manifest.tensors:
            like = self._berthed.get(entry.name)
            like = self._like(entry) if like is None else like
            if like is not None and type(like) not in PLAIN:
                boxes[entry.name] = tuple(box.region for box in _boxes_of(like))
        return boxes

    def places(self, manifest: Manifest) -> PlacesByFile:
        """Return the live memory that large tensors of a checkpoint are read into.

        From here until the next call, ``vessel`` gives the live tensors of the parts that fit.
        """
        self._berthed = matching_targets(self._berths, manifest)
        found: dict[str, list[ReadTarget]] = defaultdict(list)
        for entry in manifest.tensors:
            live = self._berthed.get(entry.name)
            if live is not None and live.nbytes >= IN_PLACE_BYTES_MIN:
                for file, place in read_targets(entry, _boxes_of(live)):
                    found[file].append(place)
        tangled = _tangled(manifest, found)
        return {
            file: sorted(places, key=lambda place: place.start)
            for file, places in found.items()
            if file not in tangled
        }

    def vessel(self, entry: TensorEntry) -> LoadTarget | None:
        """Return what to fill with a stored tensor; None if it is wanted whole.

        That is the live tensor itself, or one of the same layout where the live one does not
        exist yet or has another dtype.
        """
        live = self._berthed.get(entry.name)
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
                    hint="resume with the model that saved it, or begin with --resume never",
                )
            return live
        part = self._parts.get(entry.part) if self._together else None
        ask = getattr(part.stateful, "like", None) if part is not None else None
        found = ask(entry.name.removeprefix(f"{entry.part}/")) if ask is not None else None
        if found is None or type(found) in PLAIN or tuple(found.shape) != entry.shape:
            return None
        return found  # type: ignore[no-any-return]  # what a Stateful of anyone returns


def _may_be_sharded(part: Part) -> bool:
    return part.scope == "replicated" and not part.document


def _tangled(manifest: Manifest, files: Collection[str]) -> set[str]:
    """Return the files in which regions overlap, as no writer of ours lays them out."""
    spans: dict[str, list[tuple[int, int]]] = {file: [] for file in files}
    for entry in manifest.tensors:
        for one in entry.regions:
            if one.file in spans and one.size_bytes:
                spans[one.file].append((one.start, one.start + one.size_bytes))
    return {
        file
        for file, found in spans.items()
        if any(first[1] > second[0] for first, second in pairwise(sorted(found)))
    }


def _boxes_of(tensor: torch.Tensor) -> tuple[LocalShard, ...]:
    if type(tensor) in PLAIN:
        return (LocalShard(whole(tensor.shape), tensor.detach()),)
    # Only sharded training pays for loading torch's part about it.
    from resilient.state_dict.sharding import local_shards

    return local_shards(tensor)


def stored_name(name: str, part: Part, rank: int) -> str:
    """Return the name under which this rank's copy of a part is stored."""
    return rank_part(name, rank) if part.scope == "rank" else name


def absent_parts(manifest: Manifest, parts: Mapping[str, Part], rank: int) -> tuple[str, ...]:
    """Return the parts that the checkpoint does not hold for this rank.

    Raises:
        IncompatibleCheckpoint: one of them is neither optional nor a part that each rank has
            for itself, so going on would silently start it afresh.
    """
    held = {entry.name for entry in manifest.parts}
    absent = tuple(
        name for name, part in parts.items() if stored_name(name, part, rank) not in held
    )
    for name in absent:
        if parts[name].scope == "replicated" and not parts[name].optional:
            raise IncompatibleCheckpoint(
                f"{manifest.checkpoint} holds no `{name}`; going on would start it afresh",
                hint="resume with the configuration that saved it, or begin with --resume never",
            )
    return absent


_LYING_BYTES_MIN = 64 << 10
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
    """Load the parts that a checkpoint holds; return those that may be absent and are.

    Args:
        manifest: of the checkpoint.
        files: as in ``load``.
        parts: as in ``load``.
        rank: of this process.
        landing: as in ``load``.
        check: compares the run that saved with this one before anything is loaded.
    """
    if check.examine is not None:
        check.examine(manifest.config)
    absent = absent_parts(manifest, parts, rank)
    fresh = load(manifest, files, parts, rank, landing, check)
    return (*absent, *fresh)


def load(
    manifest: Manifest,
    files: Mapping[str, Content],
    parts: Mapping[str, Part],
    rank: int,
    landing: LoadPlan | None = None,
    check: ResumeCheck | None = None,
) -> tuple[str, ...]:
    """Give every part that the checkpoint holds its state back, in the order of ``parts``.

    A part may have a method ``check_saved(state_dict)``. It is called for every part before the
    first part is loaded, with tensors of zeros that take no memory.

    Crash: only this process's memory changed.

    Args:
        manifest: the table of contents.
        files: proved content by file name; all that ``landing`` wants of the parts.
        parts: what to load into; parts that the checkpoint lacks are left alone.
        rank: whose copies of the parts of scope ``rank``.
        landing: where sharded tensors go; found from ``parts`` if it is not given.
        check: compares what was saved with the live objects before the first part is loaded.

    Returns:
        Parts that ``check`` leaves as they are.

    Raises:
        IncompatibleCheckpoint: a part refuses the state, for example another shape.
        IntegrityError: a document is not what a checkpoint's can be.
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
    fresh = check.fresh_parts(manifest, trees, parts) if check is not None else frozenset()
    for name in list(trees):
        part = parts[name]
        if name in fresh:
            del trees[name]
        elif hasattr(part.stateful, "check_saved"):
            outline = unflatten(trees[name], partial(_outline, tensors))
            with _told_of(name, manifest):
                part.stateful.check_saved(outline)
    for name in list(trees):
        state = unflatten(trees.pop(name), _Reader(tensors, files, landing))
        with _told_of(name, manifest):
            parts[name].stateful.load_state_dict(state)
    return tuple(fresh)


def _outline(entries: Mapping[str, TensorEntry], name: str) -> torch.Tensor:
    """Return a tensor of zeros with the dtype and shape of a stored one, over one element."""
    if name not in entries:
        raise IntegrityError(f"a checkpoint's state names `{name}`, which it does not hold")
    entry = entries[name]
    return torch.zeros((), dtype=TORCH_DTYPES[entry.dtype]).expand(entry.shape)


@contextmanager
def _told_of(name: str, manifest: Manifest) -> Iterator[None]:
    """Say which part of which checkpoint it was that something does not take."""
    try:
        yield
    except ResilientError:
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise IncompatibleCheckpoint(
            f"`{name}` cannot take its state from {manifest.checkpoint}: {error}",
            hint=f"resilient ckpt inspect {manifest.checkpoint} --tensors",
        ) from error


class _Reader:
    """Gives tensors by name, made once, so that tied tensors stay one object."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        files: Mapping[str, Content],
        landing: LoadPlan,
    ) -> None:
        self._entries = entries
        self._files = files
        self._landing = landing
        self._made: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._entries:
            raise IntegrityError(f"a checkpoint's state names `{name}`, which it does not hold")
        if name not in self._made:
            self._made[name] = self._make(self._entries[name])
        return self._made[name]

    def _make(self, entry: TensorEntry) -> torch.Tensor:
        vessel = self._landing.vessel(entry)
        if vessel is None:
            return assemble(entry, self._files)
        for box in vessel.boxes:
            _fill(box, entry, self._files)
        return vessel.tensor


def assemble(entry: TensorEntry, files: Mapping[str, Content]) -> torch.Tensor:
    """Return a whole tensor on the CPU, put together from its stored regions.

    A large one that is stored in one piece lies in the memory of its file, and is nobody else's.

    Args:
        entry: where the regions lie.
        files: proved content by file name.
    """
    lying = _as_it_lies(entry, files)
    if lying is not None:
        return lying
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    _fill(LocalShard(whole(entry.shape), tensor), entry, files)
    return tensor


def _as_it_lies(entry: TensorEntry, files: Mapping[str, Content]) -> torch.Tensor | None:
    """Return a tensor over the memory that its bytes were read into; None if that cannot be.

    Not where they begin elsewhere than torch would have put them: the fastest way to sum numbers
    may differ with it, and the last bits of the sum with that.
    """
    stored = entry.regions[0] if len(entry.regions) == 1 else None
    if stored is None or stored.size_bytes < _LYING_BYTES_MIN:
        return None
    view = view_of(files[stored.file], stored.start, stored.size_bytes)
    if view.readonly or not stored.region.is_whole(entry.shape):
        return None
    tensor = torch.frombuffer(view, dtype=TORCH_DTYPES[entry.dtype]).view(entry.shape)
    return None if tensor.data_ptr() % MEMORY_ALIGNMENT else tensor


def _fill(box: LocalShard, entry: TensorEntry, files: Mapping[str, Content]) -> None:
    """Copy a box of a stored tensor into memory, whichever regions it is stored in.

    What was read into this very memory is there already.

    Args:
        box: any device, any strides; of the stored dtype.
        entry: where the regions lie.
        files: proved content by file name.
    """
    item = ITEM_BYTES[entry.dtype]
    for stored in entry.regions:
        for part, start, length in stored_spans(stored, box.region, item):
            words = np.frombuffer(view_of(files[stored.file], start, length), _WORDS[item])
            data = box.part(part)
            if words.ctypes.data != data.data_ptr():
                _copy_words(data, _strided(words, stored, part))


def _strided(words: np.ndarray[Any, Any], stored: StoredRegion, part: Region) -> Any:
    """Return ``part`` of a stored region, of which ``words`` are the bytes from its first on."""
    strides = [step * words.itemsize for step in row_strides(stored.region.lengths)]
    return np.lib.stride_tricks.as_strided(words, part.lengths, strides, writeable=False)


def _copy_words(target: torch.Tensor, words: Any) -> None:
    """Copy bits into a tensor whose elements are as wide as the words."""
    host = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
    # NumPy does not know every dtype of torch; integers of the same width carry any of them.
    np.copyto(host.view(_TORCH_WORDS[words.itemsize]).numpy(), words)
    if host is not target:
        target.copy_(host)
