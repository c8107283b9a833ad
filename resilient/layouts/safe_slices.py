"""Distributed checkpoints of torch in safetensors: each rank's boxes in a file of its own.

Source: ``torch.distributed.checkpoint.hf_storage`` of torch 2.13. There is no index: each header
says where in the whole tensor its boxes begin. The files may lie in ``sharded`` beside whole ones.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from resilient.format.regions import Region
from resilient.layouts.distributed import Index, part_of
from resilient.layouts.documents import read_header
from resilient.layouts.rebuilding import shape_of
from resilient.layouts.values import Cure, Piece, Problem, Tensor, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.storage.folder import Folder, Listing

TITLE = "a distributed checkpoint of torch, in safetensors"
RESUME = (
    "torch.distributed.checkpoint.load(state, storage_reader="
    "torch.distributed.checkpoint.HuggingFaceStorageReader('{path}'))"
)
_SHARD = re.compile(r"(?:sharded/)?shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_PLACES, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_OFFSETS = "saved_offsets"
_GAPS_MAX = 8


def is_sliced(listing: Listing) -> bool:
    """Say whether a folder has such files, and no whole ones beside them."""
    is_whole = any(one.startswith("model") and "/" not in one for one in listing.sizes)
    return not is_whole and any(_SHARD.fullmatch(one) for one in listing.sizes)


def read_slices(folder: Folder, listing: Listing) -> Index:
    """Return what the headers say together.

    Raises:
        StoreError: it could not be read.
    """
    boxes: dict[str, list[Tensor]] = {}
    problems: list[Problem] = []
    version, numbers = "", set()
    for name in sorted(listing.sizes):
        match = _SHARD.fullmatch(name)
        if match is None:
            continue
        numbers.add(int(match[1]))
        try:
            tensors, meta = read_header(folder, listing, name)
            version = version or str(meta.get(_VERSION, ""))[:40]
            for one in _placed(tensors, meta):
                boxes.setdefault(one.name, []).append(one)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True, cure=Cure.COPY))
    lost = sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)[:_GAPS_MAX]
    for number in lost:
        what = f"the files of rank {number - 1} are missing: no `shard-{number:05d}-model-*`"
        problems.append(Problem(".", what, is_fatal=True, cure=Cure.COPY))
    whole = tuple(_joined(one) for one in boxes.values())
    problems += [] if problems else _untiled(whole)
    ranks = max(numbers, default=0) or None
    return Index(whole, {}, frozenset(), version, ranks, tuple(problems))


def _placed(tensors: tuple[Tensor, ...], meta: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the boxes of one file, each with where in its tensor it is.

    Raises:
        Unreadable: the header does not say it.
    """
    try:
        places = json.loads(str(meta.get(_PLACES, "")))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"its header has no `{_PLACES}` that is JSON") from error
    for one in tensors:
        said = places.get(one.name) if isinstance(places, dict) else None
        offsets = said.get(_OFFSETS) if isinstance(said, dict) else None
        if not isinstance(offsets, list) or len(offsets) != len(one.shape):
            raise Unreadable(f"its header does not say where `{one.name[:80]}` begins")
        region = Region(shape_of(offsets), one.shape)
        pieces = (Piece(region, piece.file, piece.start, piece.size_bytes) for piece in one.pieces)
        yield Tensor(one.name, part_of(one.name), one.dtype, one.shape, one.files, tuple(pieces))


def _joined(boxes: list[Tensor]) -> Tensor:
    """Return a tensor out of its boxes; it ends where the last of them does."""
    pieces = tuple(piece for one in boxes for piece in one.pieces)
    ends = [
        [at + length for at, length in zip(one.region.offsets, one.region.lengths, strict=True)]
        for one in pieces
        if len(one.region.lengths) == len(boxes[0].shape)
    ]
    shape = tuple(max(axis) for axis in zip(*ends, strict=True))
    files = tuple(dict.fromkeys(file for one in boxes for file in one.files))
    return Tensor(boxes[0].name, boxes[0].part, boxes[0].dtype, shape, files, pieces)


def _untiled(tensors: tuple[Tensor, ...]) -> list[Problem]:
    """Return the tensors whose boxes have not as many elements as they have."""
    return [
        Problem(
            one.files[0], f"the pieces of `{one.name[:80]}` do not make it whole", is_fatal=True
        )
        for one in tensors
        if sum(math.prod(piece.region.lengths) for piece in one.pieces) != one.elements
    ][:_GAPS_MAX]
