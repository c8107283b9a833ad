"""Reader of torch's distributed checkpoints (DCP): with a pickled index, or as safetensors files.

In the form with an index, each rank writes its pieces of tensors (slices) to one file. Each slice
is a whole torch file with checksums. The safetensors form has no index, because the header of each
file has the offsets of its pieces within the whole tensors. These files may be in a folder
``sharded``, beside files with whole tensors.

Sources: ``torch.distributed.checkpoint.metadata`` and ``.filesystem`` of torch 2.x, and
``torch.distributed.checkpoint.hf_storage`` of torch 2.13.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from resilient.format.regions import Region
from resilient.layouts.field_types import count_fault, miscounted
from resilient.layouts.json_files import decimal, read_header, whole
from resilient.layouts.model import (
    MODEL,
    OPTIMIZER,
    Optimizer,
    Piece,
    Problem,
    Remedy,
    StorageFormat,
    Tensor,
    Unreadable,
)
from resilient.layouts.pickle_names import dtype_of, rebuild, shape_of
from resilient.layouts.pickle_reader import BYTES_MAX, PickledCall, PickledGlobal, read_pickle
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from resilient.storage.folder import DirectoryListing, Folder

INDEX = ".metadata"
SLICES = ".distcp"
_OF_METADATA = {"torch.distributed.checkpoint.metadata"}
_HOMES: Mapping[str, set[str]] = {
    **dict.fromkeys(
        (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            "_MEM_FORMAT_ENCODING",
            *("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        ),
        _OF_METADATA,
    ),
    "_StorageInfo": {"torch.distributed.checkpoint.filesystem"},
}
"""Modules in which torch defines the classes of an index. Another module is a sign of damage."""
_ROOTS = {"torch", "builtins", "collections", "pathlib", "copyreg", "_codecs", "numpy", "datetime"}


@dataclass(frozen=True, slots=True)
class Slice:
    """Location of a piece of a value: a file and a range of its bytes.

    Attributes:
        file: Name of the file.
        start: Offset in the file, in bytes.
        size_bytes: Length in bytes.
        offsets: Offsets of the piece in its tensor; None if it is not a tensor.
        is_plain: Whether the bytes are as torch saves them, without compression.
    """

    file: str
    start: int
    size_bytes: int
    offsets: tuple[int, ...] | None = None
    is_plain: bool = True


@dataclass(frozen=True, slots=True)
class Index:
    """Content of an index.

    Attributes:
        tensors: All tensors, as whole tensors.
        slices: Locations of the pieces by name. A value that is not a tensor has one piece.
        values: Names of values that are not tensors.
        version: Version of the format; empty in old files.
        ranks: Number of ranks, derived from the highest file number.
        problems: Missing or contradictory content.
        paths: Keys of nested dicts from which torch's planner made each name.
    """

    tensors: tuple[Tensor, ...]
    slices: Mapping[str, tuple[Slice, ...]]
    values: frozenset[str]
    version: str
    ranks: int | None
    problems: tuple[Problem, ...]
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


def read_index(
    folder: Folder, listing: DirectoryListing, prefix: str = "", part: str = ""
) -> Index:
    """Read the index of a distributed checkpoint and check it against the files.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        prefix: Folder of the index inside ``folder``, with a ``/`` at its end.
        part: Part of all tensors; if empty, the names determine the part.

    Raises:
        Unreadable: The index is missing, damaged or hostile.
        StoreError: The index could not be read.
    """
    name = f"{prefix}{INDEX}"
    if name not in listing.sizes:
        raise Unreadable(listing.why_unread(name))
    if listing.sizes[name] > BYTES_MAX:
        raise Unreadable(f"an index of {listing.sizes[name]} bytes")
    pickled = read_pickle(folder.read(name, 0, BYTES_MAX), rebuild)
    value = pickled.value
    strange_names = sorted(
        pickled_name.dotted for pickled_name in pickled.names if _is_unknown_name(pickled_name)
    )
    if strange_names:
        raise Unreadable(f"it names `{strange_names[0][:80]}`, which torch does not have")
    entries = value.get("state_dict_metadata") if isinstance(value, PickledCall) else None
    if not isinstance(entries, dict):
        raise Unreadable("it is not the index of a distributed checkpoint")
    slices, problems = _slices(value.get("storage_data"), listing, prefix)
    tensors = tuple(
        _tensor(key, entry, part or part_of(key), slices.get(key, ()))
        for key, entry in entries.items()
        if isinstance(key, str) and isinstance(entry, PickledCall) and _is_tensor(entry)
    )
    keys = {key for key in entries if isinstance(key, str)}
    version = value.get("version")
    return Index(
        tensors,
        slices,
        frozenset(keys - {tensor.name for tensor in tensors}),
        version if isinstance(version, str) else "",
        _ranks(listing, prefix, slices),
        (*problems, *_incomplete_tensors(entries, prefix), *_orphans(listing, prefix, slices)),
        _paths(value.get("planner_data")),
    )


def _paths(names: Any) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each name, in the form of torch's default planner."""
    return {
        name: tuple(path)
        for name, path in (names.items() if isinstance(names, dict) else ())
        if isinstance(name, str)
        and isinstance(path, tuple | list)
        and path
        and all(isinstance(key, str | int) for key in path)
    }


def _is_unknown_name(name: PickledGlobal) -> bool:
    """Return True if torch does not define a name in this module."""
    modules = _HOMES.get(name.name)
    if modules is not None:
        return name.module not in modules
    return name.module in _HOMES["Metadata"] or name.module.partition(".")[0] not in _ROOTS


def value_at(folder: Folder, listing: DirectoryListing, index: Index, name: str) -> Any:
    """Return a value that is not a tensor, or the element of a one-element tensor; else None.

    Raises:
        StoreError: A file could not be read.
    """
    pieces = index.slices.get(name, ())
    if len(pieces) != 1:
        return None
    try:
        archive = open_archive(
            folder, listing, pieces[0].file, pieces[0].start, pieces[0].size_bytes
        )
        number = archive.number(archive.value)
    except Unreadable:
        return None
    return archive.value if number is None else number


def optimizer_at(
    folder: Folder, listing: DirectoryListing, index: Index, root: str
) -> Optimizer | None:
    """Return the summary of an optimizer whose names begin with ``root``; None without one.

    The names are those of ``get_optimizer_state_dict``: ``state.<parameter>.<slot>`` and
    ``param_groups.<group or parameter>.<option>``.
    """
    state = f"{root}state."
    names = [tensor.name for tensor in index.tensors if tensor.name.startswith(state)]
    names += [value for value in index.values if value.startswith(state)]
    if not names and not any(value.startswith(root) for value in index.values):
        return None
    slots = dict.fromkeys(sorted(name.rpartition(".")[2] for name in names))
    params = {name.rpartition(".")[0] for name in names}
    step = next((name for name in sorted(names) if name.endswith(".step")), "")
    rates = sorted(
        value
        for value in index.values
        if value.startswith(f"{root}param_groups.") and value.endswith(".lr")
    )
    groups = {rate.split(".")[len(root.split("."))] for rate in rates}
    numbers = (decimal(value_at(folder, listing, index, rate)) for rate in rates[:8])
    count = value_at(folder, listing, index, step) if step else None
    fault = "" if count is None else count_fault(count)
    return Optimizer(
        whole(count),
        len(params),
        len(params),
        len(groups),
        tuple(item for item in numbers if item is not None),
        tuple(slots),
        fault=miscounted(step, fault) if fault else "",
    )


def _is_tensor(entry: PickledCall) -> bool:
    return entry.kind.endswith(".TensorStorageMetadata")


def part_of(key: str) -> str:
    """Return the part of the training state to which a name belongs."""
    return OPTIMIZER if key.startswith(("optim", "opt.")) or ".optim" in key else MODEL


def _tensor(key: str, entry: PickledCall, part: str, slices: tuple[Slice, ...]) -> Tensor:
    properties = entry.get("properties")
    state = properties.state if isinstance(properties, PickledCall) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if isinstance(properties, PickledCall) and dtype is None:
        dtype = properties.get("dtype")
    files = tuple(sorted({piece.file for piece in slices}))
    pieces = _pieces(entry, slices)
    return Tensor(key, part, dtype_of(dtype), shape_of(entry.get("size")), files, pieces)


def _pieces(entry: PickledCall, slices: tuple[Slice, ...]) -> tuple[Piece, ...]:
    """Return the boxes of a tensor; empty if one box cannot be read by ranges."""
    lengths = {
        shape_of(chunk.get("offsets")): shape_of(chunk.get("sizes"))
        for chunk in entry.get("chunks") or ()
        if isinstance(chunk, PickledCall)
    }
    pieces = tuple(
        Piece(
            Region(part.offsets, lengths[part.offsets]),
            part.file,
            part.start,
            part.size_bytes,
            StorageFormat.ARCHIVE,
        )
        for part in slices
        if part.is_plain and part.offsets in lengths and part.offsets is not None
    )
    return pieces if len(pieces) == len(slices) else ()


def _slices(
    stored: Any, listing: DirectoryListing, prefix: str
) -> tuple[dict[str, tuple[Slice, ...]], list[Problem]]:
    """Return the location of every slice, and the problems of missing files."""
    slices: dict[str, list[Slice]] = defaultdict(list)
    reason_by_file: dict[str, str] = {}
    for key, info in stored.items() if isinstance(stored, dict) else ():
        name, piece = _slice(key, info, prefix)
        slices[name].append(piece)
        size_bytes = listing.sizes.get(piece.file)
        if size_bytes is None:
            reason_by_file[piece.file] = listing.why_unread(piece.file)
        elif piece.start + piece.size_bytes > size_bytes:
            reason_by_file[piece.file] = f"it ends too early, with {size_bytes} bytes"
    problems = [
        Problem(file, reason, is_fatal=True) for file, reason in sorted(reason_by_file.items())
    ]
    return {name: tuple(pieces) for name, pieces in slices.items()}, problems


def _slice(key: Any, info: Any, prefix: str) -> tuple[str, Slice]:
    if not isinstance(key, PickledCall) or not isinstance(info, PickledCall):
        raise Unreadable("its entries are not those that torch writes")
    name, file = key.get("fqn"), info.get("relative_path")
    start, length = whole(info.get("offset")), whole(info.get("length"))
    if not isinstance(name, str) or not isinstance(file, str) or start is None or length is None:
        raise Unreadable("its entries are not those that torch writes")
    offset = key.get("offset")
    offsets = shape_of(offset) if isinstance(offset, tuple) else None
    is_plain = not info.get("transform_descriptors")
    return name, Slice(f"{prefix}{file}", start, length, offsets, is_plain)


def _incomplete_tensors(entries: Mapping[Any, Any], prefix: str) -> list[Problem]:
    """Return the problems of tensors whose pieces have another number of elements."""
    problems = []
    for key, entry in entries.items():
        if not isinstance(entry, PickledCall) or not _is_tensor(entry):
            continue
        chunks = entry.get("chunks")
        sizes = [
            math.prod(shape_of(chunk.get("sizes")))
            for chunk in (chunks if isinstance(chunks, list) else [])
            if isinstance(chunk, PickledCall)
        ]
        if sum(sizes) != math.prod(shape_of(entry.get("size"))):
            problem_text = f"the pieces of `{str(key)[:80]}` do not cover it"
            problems.append(Problem(f"{prefix}{INDEX}", problem_text, is_fatal=True))
    return problems[:8]


def _orphans(
    listing: DirectoryListing, prefix: str, slices: Mapping[str, tuple[Slice, ...]]
) -> list[Problem]:
    used = {piece.file for pieces in slices.values() for piece in pieces}
    return [
        Problem(name, "the index does not name it; it may belong to an earlier save")
        for name in sorted(_files(listing, prefix))
        if name not in used
    ]


def _files(listing: DirectoryListing, prefix: str) -> list[str]:
    return [
        file
        for file in listing.sizes
        if file.startswith(prefix) and file.endswith(SLICES) and "/" not in file[len(prefix) :]
    ]


def _ranks(
    listing: DirectoryListing, prefix: str, slices: Mapping[str, tuple[Slice, ...]]
) -> int | None:
    """Return the number of ranks, without files that the index does not name."""
    used = {piece.file for pieces in slices.values() for piece in pieces}
    files = [file for file in _files(listing, prefix) if file in used]
    numbers = [file[len(prefix) :].lstrip("_").partition("_")[0] for file in files]
    ranks = [
        int(number)
        for number in numbers
        if number.isascii() and number.isdigit() and len(number) < 8  # noqa: PLR2004
    ]
    return max(ranks) + 1 if ranks else None


TITLE = "a distributed checkpoint of torch, in safetensors"
RESUME = (
    "torch.distributed.checkpoint.load(state, storage_reader="
    "torch.distributed.checkpoint.HuggingFaceStorageReader('{path}'))"
)
_SHARD = re.compile(r"(?:sharded/)?shard-(\d{5})-model-(\d{5})-of-(\d{5})\.safetensors")
_PLACES, _VERSION = "DCP_SHARDING_INFO", "DCP_VERSION"
_OFFSETS = "saved_offsets"
_GAPS_MAX = 8


def is_sliced(listing: DirectoryListing) -> bool:
    """Return True if a folder has sharded files, but no files with whole tensors."""
    is_whole = any(file.startswith("model") and "/" not in file for file in listing.sizes)
    return not is_whole and any(_SHARD.fullmatch(file) for file in listing.sizes)


def read_slices(folder: Folder, listing: DirectoryListing) -> Index:
    """Return the combined content of all headers.

    Raises:
        StoreError: A file could not be read.
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
            for piece in _placed(tensors, meta):
                boxes.setdefault(piece.name, []).append(piece)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True, cure=Remedy.COPY))
    missing_numbers = sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)[:_GAPS_MAX]
    for number in missing_numbers:
        problem_text = (
            f"the files of rank {number - 1} are missing: no `shard-{number:05d}-model-*`"
        )
        problems.append(Problem(".", problem_text, is_fatal=True, cure=Remedy.COPY))
    joined_tensors = tuple(_joined(box) for box in boxes.values())
    problems += [] if problems else _incomplete_slices(joined_tensors)
    ranks = max(numbers, default=0) or None
    return Index(joined_tensors, {}, frozenset(), version, ranks, tuple(problems))


def _placed(tensors: tuple[Tensor, ...], meta: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the boxes of one file, with their offsets in the tensor.

    Raises:
        Unreadable: The header does not give the offsets.
    """
    try:
        places = json.loads(str(meta.get(_PLACES, "")))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"its header has no `{_PLACES}` in JSON") from error
    for tensor in tensors:
        place = places.get(tensor.name) if isinstance(places, dict) else None
        offsets = place.get(_OFFSETS) if isinstance(place, dict) else None
        if not isinstance(offsets, list) or len(offsets) != len(tensor.shape):
            raise Unreadable(f"its header does not state where `{tensor.name[:80]}` starts")
        region = Region(shape_of(offsets), tensor.shape)
        pieces = (
            Piece(region, piece.file, piece.start, piece.size_bytes) for piece in tensor.pieces
        )
        yield Tensor(
            tensor.name,
            part_of(tensor.name),
            tensor.dtype,
            tensor.shape,
            tensor.files,
            tuple(pieces),
        )


def _joined(boxes: list[Tensor]) -> Tensor:
    """Return a tensor from its boxes; its shape is the extent of all boxes."""
    pieces = tuple(piece for box in boxes for piece in box.pieces)
    ends = [
        [at + length for at, length in zip(piece.region.offsets, piece.region.lengths, strict=True)]
        for piece in pieces
        if len(piece.region.lengths) == len(boxes[0].shape)
    ]
    shape = tuple(max(axis) for axis in zip(*ends, strict=True))
    files = tuple(dict.fromkeys(file for box in boxes for file in box.files))
    return Tensor(boxes[0].name, boxes[0].part, boxes[0].dtype, shape, files, pieces)


def _incomplete_slices(tensors: tuple[Tensor, ...]) -> list[Problem]:
    """Return the problems of tensors whose boxes have another number of elements."""
    return [
        Problem(
            tensor.files[0],
            f"the pieces of `{tensor.name[:80]}` do not cover it",
            is_fatal=True,
        )
        for tensor in tensors
        if sum(math.prod(piece.region.lengths) for piece in tensor.pieces) != tensor.elements
    ][:_GAPS_MAX]
