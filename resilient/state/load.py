"""Proved bytes to parts: the way back, in place, from any world size and any layout."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, ResilientError
from resilient.format.dtypes import ITEM_BYTES
from resilient.format.extents import Content, stored_spans, view_of
from resilient.format.names import rank_part
from resilient.format.regions import Region, row_strides, whole
from resilient.format.trees import tree_of
from resilient.state.boxes import Box
from resilient.state.dtypes import TORCH_DTYPES
from resilient.state.landing import Landing
from resilient.state.tree import unflatten
from resilient.storage.buffers import MEMORY_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.format.manifest import Manifest, StoredRegion, TensorEntry
    from resilient.state.capture import Part
    from resilient.state.changes import ResumeCheck

    Examine = Callable[[Mapping[str, Any]], None] | None


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


def load_what_is_there(
    manifest: Manifest,
    files: Mapping[str, Content],
    parts: Mapping[str, Part],
    rank: int,
    landing: Landing,
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
    landing: Landing | None = None,
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
    landing = landing or Landing(parts)
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
        landing: Landing,
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
    _fill(Box(whole(entry.shape), tensor), entry, files)
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


def _fill(box: Box, entry: TensorEntry, files: Mapping[str, Content]) -> None:
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
