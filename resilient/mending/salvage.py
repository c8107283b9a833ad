"""What is whole in damaged files: tensors, each proved by its checksum or by lying within a header.

They are written as safetensors, which runs nothing and says its names, beside what was lost.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.layouts.archives import Archive, tensors_in
from resilient.layouts.distributed import SLICES, read_index
from resilient.layouts.documents import HEADER_BYTES_MAX
from resilient.layouts.pickles import read_pickle
from resilient.layouts.places import settled
from resilient.layouts.rebuilding import rebuild
from resilient.layouts.values import ITEM_BITS, MODEL, Unreadable
from resilient.layouts.weights import SAFE, TORCH
from resilient.mending.drafts import Span
from resilient.mending.zips import scan_members

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.layouts.values import Problem, Tensor
    from resilient.mending.case import Case
    from resilient.mending.drafts import Draft

_PICKLE = "data.pkl"
_HEAD = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that is whole in a damaged file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What is left of one damaged file.

    Attributes:
        file: which one.
        saved: its tensors that are whole.
        lost: the names of those that are not.
    """

    file: str
    saved: tuple[Saved, ...]
    lost: tuple[str, ...]


def is_saved_so(problem: Problem) -> bool:
    """Say whether numbers are what was saved, and no damage of the file."""
    return " NaN and " in problem.what


def salvage(case: Case) -> tuple[Salvaged, ...]:
    """Return what is whole in the files that nothing mends.

    Raises:
        StoreError: they could not be read.
    """
    found = []
    hurt = {one.place for one in case.fatal() if not is_saved_so(one)}
    for name in sorted(hurt & set(case.listing.sizes)):
        try:
            one = _of_file(case.draft, name)
        except Unreadable:
            continue
        if one.saved:
            found.append(one)
    return tuple(found)


def _of_file(draft: Draft, name: str) -> Salvaged:
    if name.endswith(SAFE):
        return _of_safetensors(draft, name)
    if name.endswith(SLICES):
        return _of_slices(draft, name)
    if name.endswith(TORCH):
        return _of_zip(draft, name)
    raise Unreadable("no file of tensors")


def _of_zip(draft: Draft, name: str) -> Salvaged:
    scan = scan_members(draft, name, 0, draft.list().sizes[name])
    pickles = [one for one in scan.members if one.name.rpartition("/")[2] == _PICKLE]
    if len(pickles) != 1 or not pickles[0].is_whole:
        raise Unreadable("what says what its tensors are is damaged")
    root = pickles[0].name.removesuffix(_PICKLE)
    value = read_pickle(draft.read(name, pickles[0].data, pickles[0].size_bytes), rebuild)
    whole = {
        one.name.removeprefix(root): (one.header, one.size_bytes)
        for one in scan.members
        if one.is_whole
    }
    archive = Archive(draft, name, value.value, value.names, whole)
    return _split(draft, name, tensors_in(archive, value.value, MODEL))


def _of_slices(draft: Draft, name: str) -> Salvaged:
    prefix = name[: name.rfind("/") + 1]
    index = read_index(draft, draft.list(), prefix)
    sizes = draft.list().sizes
    whole = set()
    for one in (piece for pieces in index.slices.values() for piece in pieces):
        held = min(one.size_bytes, sizes.get(one.file, 0) - one.start)
        scan = scan_members(draft, one.file, one.start, held) if held == one.size_bytes else None
        if scan and scan.has_all and all(it.is_whole for it in scan.members):
            whole.add((one.file, one.start))
    tensors = [one for one in index.tensors if name in one.files]
    kept = [
        one
        for one in tensors
        if one.pieces and all((it.file, it.start) in whole for it in one.pieces)
    ]
    found = _split(draft, name, kept)
    return Salvaged(name, found.saved, tuple(one.name for one in tensors if one not in kept))


def _of_safetensors(draft: Draft, name: str) -> Salvaged:
    size_bytes = draft.list().sizes[name]
    (length,) = _HEAD.unpack(draft.read(name, 0, _HEAD.size).ljust(_HEAD.size, b"\0"))
    if length > min(HEADER_BYTES_MAX, size_bytes):
        raise Unreadable("its header is damaged")
    try:
        entries = json.loads(draft.read(name, _HEAD.size, length))
        entries.pop("__metadata__", None)
        saved, lost = [], []
        for key, one in entries.items():
            begin, end = one["data_offsets"]
            shape, at = tuple(one["shape"]), _HEAD.size + length + begin
            fits = end - begin == math.prod(shape) * ITEM_BITS[one["dtype"]] // 8
            if fits and 0 <= begin <= end and at + end - begin <= size_bytes:
                span = Span(draft, name, at, end - begin)
                saved.append(Saved(key, one["dtype"], shape, span))
            else:
                lost.append(key)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise Unreadable("its header is damaged") from error
    return Salvaged(name, tuple(saved), tuple(lost))


def _split(
    draft: Draft, name: str, tensors: Iterator[Tensor] | list[Tensor] | tuple[Tensor, ...]
) -> Salvaged:
    saved, lost = [], []
    for one in tensors:
        try:
            saved.append(_saved(draft, one))
        except Unreadable:
            lost.append(one.name)
    return Salvaged(name, tuple(saved), tuple(lost))


def _saved(draft: Draft, tensor: Tensor) -> Saved:
    """Return where a tensor lies in one row.

    Raises:
        Unreadable: it does not, or its bytes are not here.
    """
    if len(tensor.pieces) != 1:
        raise Unreadable("it is in several pieces" if tensor.pieces else "its bytes are not here")
    piece = settled(draft, draft.list(), tensor.pieces[0], tensor.dtype)
    item = ITEM_BITS.get(tensor.dtype, 0) // 8
    if not item or piece.is_swapped or not _is_row(piece.strides, tensor.shape):
        raise Unreadable("it does not lie in one row")
    at, size_bytes = piece.start + piece.first * item, tensor.size_bytes
    if piece.first * item + size_bytes > piece.size_bytes:
        raise Unreadable("its bytes are not here")
    return Saved(tensor.name, tensor.dtype, tensor.shape, Span(draft, piece.file, at, size_bytes))


def _is_row(strides: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    if strides is None:
        return True
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            return False
        step *= max(length, 1)
    return True


def safetensors_pieces(saved: tuple[Saved, ...]) -> tuple[Span | bytes, ...]:
    """Return a file of safetensors with these tensors."""
    entries, at = {}, 0
    for one in saved:
        end = at + one.span.size_bytes
        entries[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, end]}
        at = end
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return (_HEAD.pack(len(head)) + head, *(one.span for one in saved))
