"""Save plan: the regions of tensors that each rank writes, their files, and the file layouts.

A region is a box of elements of a tensor. If the regions of a rank have many bytes, the plan
distributes them over several files. Several files can be written and read concurrently, and the
repair of a lost file is cheaper. A file contains whole regions. Only a region larger than the
maximum file size is split. A plan is computed once, and reused for saves of the same structure.

The planner also encodes the state without tensors as JSON. It reuses the JSON of values that did
not change since the last save.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import UnsavableState
from resilient.format.keys import rank_part_file, shard_name
from resilient.format.manifest import StoredRegion, TensorEntry
from resilient.format.regions import ITEM_BYTES, Region, whole
from resilient.format.safetensors_file import StreamedFile, TensorSlot, compute_layout
from resilient.format.state_json import INDENT, JsonRows, insert_rows
from resilient.state_dict.capture_cache import CachedTensors, CachedTree
from resilient.state_dict.flatten import PLAIN
from resilient.state_dict.host_copy import target_in
from resilient.state_dict.sharding import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.distributed.launch_env import World
    from resilient.format.safetensors_file import FileLayout
    from resilient.state_dict.snapshot import FlattenedPart, Snapshot

_SPLIT_BYTES_MIN = 256 << 10


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, safetensors dtype and global shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Length of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Partition = tuple[tuple[tuple[TensorSpec, Region], ...], ...]
"""Regions that each rank writes, by rank."""


def partition(specs: Sequence[TensorSpec], ranks: int) -> Partition:
    """Assign every element to one rank, with bytes split evenly over the ranks.

    The concatenated tensors are cut into ``ranks`` equal pieces. A large tensor at a cut is split
    between two rows. A small tensor at a cut belongs to the rank that has its middle.

    Args:
        specs: Tensors, the same on every rank, in the same order.
        ranks: Number of writing ranks.
    """
    total = sum(spec.size_bytes for spec in specs)
    cuts = [total * rank / ranks for rank in range(ranks + 1)]
    pieces_by_rank: list[list[tuple[TensorSpec, Region]]] = [[] for _ in range(ranks)]
    begin = 0
    for spec in specs:
        for rank, region in _pieces(spec, begin, cuts):
            pieces_by_rank[rank].append((spec, region))
        begin += spec.size_bytes
    return tuple(tuple(pieces) for pieces in pieces_by_rank)


def _pieces(spec: TensorSpec, begin: int, cuts: Sequence[float]) -> list[tuple[int, Region]]:
    """Return (rank, region) of one tensor whose bytes begin at ``begin`` in the concatenation."""
    ranks = len(cuts) - 1
    if spec.size_bytes < _SPLIT_BYTES_MIN or not spec.shape:
        middle = begin + spec.size_bytes / 2
        owner = next(rank for rank in range(ranks) if middle < cuts[rank + 1] or rank == ranks - 1)
        return [(owner, whole(spec.shape))]
    rows = spec.shape[0]
    row_bytes = spec.size_bytes / rows
    edges = [min(max(round((cut - begin) / row_bytes), 0), rows) for cut in cuts]
    edges[0], edges[-1] = 0, rows
    row_shape = spec.shape[1:]
    return [
        (rank, Region((first, *(0 for _ in row_shape)), (last - first, *row_shape)))
        for rank, (first, last) in enumerate(pairwise(edges))
        if last > first
    ]


@dataclass(frozen=True, slots=True, eq=False)
class WriteItem:
    """One region that this rank writes.

    Attributes:
        spec: Global tensor.
        region: Box of the tensor.
        data: Elements of the box, on any device, with any strides.
    """

    spec: TensorSpec
    region: Region
    data: torch.Tensor

    @property
    def size_bytes(self) -> int:
        """Length of the box's elements in bytes."""
        return self.region.size * ITEM_BYTES[self.spec.dtype]


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return a tensor's name, dtype and global shape."""
    return TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def write_items(tensors: Mapping[str, torch.Tensor], world: World) -> list[WriteItem]:
    """Return this rank's writes; all ranks together write every element once.

    Tensors on the same ranks are split evenly over these ranks. All ranks have plain tensors. In a
    mesh with a replicated dimension, the replicas have the same shards. Any other shard is written
    by its own rank.

    Args:
        tensors: Tensors by name; the same names on every rank, in the same order.
        world: Identity of this rank.
    """
    all_ranks = tuple(range(world.size))
    groups: dict[tuple[int, ...], list[WriteItem]] = defaultdict(list)
    for name, tensor in tensors.items():
        spec = spec_of(name, tensor)
        if not spec.size_bytes:
            # The tensor has no element, but must be stored too.
            empty_tensor = torch.empty(spec.shape, dtype=tensor.dtype)
            groups[all_ranks].append(WriteItem(spec, whole(spec.shape), empty_tensor))
            continue
        if type(tensor) in PLAIN:
            groups[all_ranks].append(WriteItem(spec, whole(spec.shape), tensor))
            continue
        # Import inside the function, because only sharded training needs the slow import of
        # DTensor.
        from resilient.state_dict.sharding import holders, local_shards

        for box in local_shards(tensor):
            groups[holders(tensor)].append(WriteItem(spec, box.region, box.data))
    return [
        piece
        for ranks, pieces in groups.items()
        for piece in _split(pieces, len(ranks), ranks.index(world.rank))
    ]


def _split(pieces: list[WriteItem], ranks: int, rank: int) -> list[WriteItem]:
    """Return one rank's share of pieces that ``ranks`` ranks have."""
    if ranks == 1:
        return pieces
    specs = [
        TensorSpec(str(number), piece.spec.dtype, piece.region.lengths)
        for number, piece in enumerate(pieces)
    ]
    return [_narrow(pieces[int(spec.name)], part) for spec, part in partition(specs, ranks)[rank]]


def split_item(piece: WriteItem, count: int) -> list[WriteItem]:
    """Cut a piece between its rows into ``count`` pieces of nearly equal bytes.

    A small piece and a piece with few rows are cut into fewer pieces.
    """
    return [part for number in range(count) for part in _split([piece], count, number)]


def _narrow(piece: WriteItem, part: Region) -> WriteItem:
    """Return a part of a piece; ``part`` has coordinates within the piece."""
    data = box_of(piece.data, part)
    offsets = tuple(map(sum, zip(piece.region.offsets, part.offsets, strict=True)))
    return WriteItem(piece.spec, Region(offsets, part.lengths), data)


def box_of(data: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a box of a tensor as a view; the box has coordinates within the tensor."""
    if not region.size or region.is_whole(data.shape):
        return data
    for axis, (offset, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
        data = data.narrow(axis, offset, length)
    return data


FILE_BYTES_MAX = 256 << 20
"""Target maximum size of a file; only a tensor with larger rows exceeds it."""
FILE_BYTES_MIN = 16 << 20
"""Minimum size of a cut file, because each file costs the store its own requests."""
FILES_MIN = 4
"""Minimum number of files of a large share."""


def split_into_files(share: list[WriteItem]) -> list[list[WriteItem]]:
    """Divide a share into files of consecutive pieces, with sizes as equal as possible.

    The same shapes always give the same files, for any values of the tensors.

    Args:
        share: This rank's writes of one part.
    """
    pieces = [part for piece in share for part in _cut_if_huge(piece)]
    left_bytes = sum(piece.size_bytes for piece in pieces)
    files = _files_for(left_bytes, FILES_MIN)
    bundles: list[list[WriteItem]] = [[]] if pieces else []
    goal_bytes, filled_bytes = left_bytes / files, 0
    for piece in pieces:
        if bundles[-1] and filled_bytes + piece.size_bytes / 2 > goal_bytes:
            # Divide the remaining bytes again, because a large piece moves all later cuts.
            left_bytes -= filled_bytes
            goal_bytes, filled_bytes = left_bytes / max(files - len(bundles), 1), 0
            bundles.append([])
        bundles[-1].append(piece)
        filled_bytes += piece.size_bytes
    return bundles


def _cut_if_huge(piece: WriteItem) -> list[WriteItem]:
    count = -(-piece.size_bytes // FILE_BYTES_MAX)
    return split_item(piece, count) if count > 1 else [piece]


def _files_for(size_bytes: int, files_min: int) -> int:
    """Return the number of files for a number of bytes."""
    full_file_count = -(-size_bytes // FILE_BYTES_MAX)
    return max(full_file_count, min(files_min, size_bytes // FILE_BYTES_MIN), 1)


# Maximum depth of a cached constant: parts, an optimizer's state, a parameter's state.
_CONSTANT_DEPTH = 3
_EDGE = " " * INDENT
_INTS = frozenset({int})
# Types for which equal values have equal JSON.
_EXACT = frozenset({type(None), bool, int, str})
_WORDS = {None: "null", True: "true", False: "false"}


DIGITS_MAX = 4300
"""Maximum number of digits of an integer that Python parses by default."""
_INT_END = 10**DIGITS_MAX


def tree_to_json(tree: Any) -> str:
    """Return a tree as JSON.

    Raises:
        UnsavableState: An integer has more digits than can be read.
    """
    try:
        return _text(tree, _CONSTANT_DEPTH)
    except ValueError as error:
        require_readable_numbers(tree)
        raise UnsavableState(f"the state is not valid JSON: {error}") from error


def require_readable_numbers(tree: Any, path: str = "") -> None:
    """Raise if an integer in a tree has more digits than can be read.

    Raises:
        UnsavableState: Names the path of the integer.
    """
    if type(tree) is int and abs(tree) >= _INT_END:
        raise UnsavableState(
            f"`{path}` is an integer of more than {DIGITS_MAX} digits, which cannot be read back",
            path=path,
            hint="return bytes or text from state_dict()",
        )
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            is_tag = isinstance(key, str) and key.startswith("$")
            require_readable_numbers(value, path if is_tag else f"{path}/{key}".removeprefix("/"))


def document_to_json(tree: Any) -> str:
    """Return a tree as an indented document for people.

    Raises:
        UnsavableState: An integer has more digits than can be read.
    """
    try:
        return _document_of(tree)
    except ValueError as error:
        require_readable_numbers(tree)
        raise UnsavableState(f"the state is not valid JSON: {error}") from error


def _document_of(tree: Any) -> str:
    if type(tree) is not dict or not tree:
        return _dumped(tree) + "\n"
    fields = {name: value for name, value in tree.items() if isinstance(value, JsonRows)}
    # Same format as json.dumps, which is slow with an indent.
    lines = [f"{_EDGE}{_quoted(key)}: {_value_text(tree[key])}" for key in sorted(tree)]
    text = "{\n" + ",\n".join(lines) + "\n}"
    for name, rows in fields.items():
        text = insert_rows(text, name, rows)
    return text + "\n"


def is_same_json(left: Any, right: Any) -> bool:
    """Return whether two trees have the same JSON, with keys in the same order."""
    kind = type(left)
    if left is right or kind is not type(right):
        return left is right
    if kind is list:
        if _INTS.issuperset(map(type, left)) and _INTS.issuperset(map(type, right)):
            return bool(left == right)
        return len(left) == len(right) and all(map(is_same_json, left, right))
    if kind is dict:
        return [*left] == [*right] and all(map(is_same_json, left.values(), right.values()))
    # Positive and negative zero are equal floats with different JSON.
    return repr(left) == repr(right) if kind is float else kind in _EXACT and bool(left == right)


def _text(tree: Any, depth: int) -> str:
    if isinstance(tree, CachedTree):
        return tree.text
    if not _has_constants(tree, depth):
        return json.dumps(tree, allow_nan=False, default=_spelled)
    # Same format as json.dumps.
    inner = [
        f"{_quoted(key)}: {value.text if type(value) is CachedTree else _text(value, depth - 1)}"
        for key, value in tree.items()
    ]
    return "{" + ", ".join(inner) + "}"


def _has_constants(tree: Any, depth: int) -> bool:
    """Return whether the first levels of a tree contain a constant with cached text."""
    if not depth or type(tree) is not dict:
        return isinstance(tree, CachedTree)
    return any(_has_constants(value, depth - 1) for value in tree.values())


def _value_text(value: Any) -> str:
    """Return the JSON text of a field in a document."""
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int:
        return repr(value)
    if value is None or kind is bool:
        return _WORDS[value]
    if isinstance(value, JsonRows):
        return "[]"
    # A JSON string never contains a line break.
    return _dumped(value).replace("\n", "\n" + _EDGE)


def _dumped(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True, indent=INDENT, allow_nan=False, default=_spelled)


def _spelled(rows: JsonRows) -> list[Any]:
    return rows.trees()


_Shapes = tuple[tuple[str, "torch.dtype", "torch.Size"], ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PlannedFile:
    """Layout of a file whose bytes are not written yet.

    Attributes:
        name: File name inside the checkpoint's folder.
        layout: Layout of the file.
        entries: Manifest entries of its tensors, one region each.
        sources: Elements of each entry's region; they share memory with training.
    """

    name: str
    layout: FileLayout
    entries: tuple[TensorEntry, ...]
    sources: tuple[torch.Tensor, ...]

    def destinations(self, buffer: memoryview) -> tuple[torch.Tensor, ...]:
        """Return the places of the sources in the file's memory."""
        return tuple(
            target_in(buffer, entry.regions[0].start, source)
            for entry, source in zip(self.entries, self.sources, strict=True)
        )

    def streamed(self) -> StreamedFile:
        """Return the file as a streamed file."""
        return StreamedFile(self.name, self.layout.size_bytes, self.entries, self._fill)

    def _fill(self, buffer: memoryview) -> None:
        buffer[: len(self.layout.head)] = self.layout.head
        for source, target in zip(self.sources, self.destinations(buffer), strict=True):
            target.copy_(source)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Plan of a file without references to tensors.

    Attributes:
        boxes: Tensor and box of each entry; None stands for the whole tensor.
    """

    name: str
    layout: FileLayout
    entries: tuple[TensorEntry, ...]
    boxes: tuple[tuple[str, Region | None], ...]

    @classmethod
    def like(cls, draft: PlannedFile) -> _Plan:
        """Return the plan of a planned file."""
        boxes = ((entry, entry.regions[0].region) for entry in draft.entries)
        picks = (
            (tensor.name, None if box.is_whole(tensor.shape) else box) for tensor, box in boxes
        )
        return cls(draft.name, draft.layout, draft.entries, tuple(picks))

    def saying(self, text: str) -> _Plan:
        """Return the plan with other values in the header, which may shift all tensors.

        Args:
            text: JSON of the values of a per-rank part.
        """
        slots = [
            TensorSlot(entry.name.removeprefix(f"{entry.part}/"), entry.dtype, entry.shape)
            for entry in self.entries
        ]
        layout = compute_layout(slots, {"state": text})
        moved_bytes = layout.size_bytes - self.layout.size_bytes
        if not moved_bytes:
            return replace(self, layout=layout)
        entries = tuple(_moved(entry, moved_bytes) for entry in self.entries)
        return replace(self, layout=layout, entries=entries)

    def of(self, tensors: Mapping[str, torch.Tensor]) -> PlannedFile:
        """Return the file of this save."""
        sources = tuple(
            tensors[name] if box is None else box_of(tensors[name], box) for name, box in self.boxes
        )
        return PlannedFile(self.name, self.layout, self.entries, sources)


class SavePlanner:
    """Cache of a part's file layout, for the next save of the same structure.

    The files of a part depend only on the names, types and shapes of its tensors. The planner plans
    tensors that are sharded over ranks again at each save. The header of a per-rank part also
    contains its other values. The plan keeps no tensors. For ``CachedTensors`` it returns the same
    file objects again.
    """

    def __init__(self) -> None:
        self._own_plans: dict[str, tuple[Any, str, _Shapes, _Plan]] = {}
        self._plans: dict[str, tuple[World, _Shapes, list[_Plan]]] = {}

    def of(self, snapshot: Snapshot, world: World) -> list[PlannedFile]:
        """Return this rank's files with tensors of a snapshot; nothing is copied.

        Crash: nothing was stored.

        Args:
            snapshot: State of this rank.
            world: Identity of this rank.
        """
        drafts = []
        for part in snapshot.parts:
            if part.scope == "replicated":
                drafts += self._share(part, world)
        rank_parts = [part for part in snapshot.parts if part.scope == "rank"]
        return drafts + [self._own_draft(part, world.rank) for part in rank_parts]

    def _share(self, part: FlattenedPart, world: World) -> list[PlannedFile]:
        if not isinstance(part.tensors, CachedTensors):
            return self._planned(part, world)
        drafts = part.tensors.drafts
        if world not in drafts:
            drafts[world] = self._planned(part, world)
        return drafts[world]

    def _planned(self, part: FlattenedPart, world: World) -> list[PlannedFile]:
        if any(type(tensor) not in PLAIN for tensor in part.tensors.values()):
            return _shares(part, world)
        shapes = _shapes_of(part)
        record = self._plans.get(part.name)
        if record is None or record[:2] != (world, shapes):
            plans = [_Plan.like(share) for share in _shares(part, world)]
            record = self._plans[part.name] = (world, shapes, plans)
        return [plan.of(part.tensors) for plan in record[2]]

    def _own_draft(self, part: FlattenedPart, rank: int) -> PlannedFile:
        name, shapes = own_file(part, rank), _shapes_of(part)
        tree, text, planned_shapes, plan = self._own_plans.get(name, (None, "", None, None))
        if plan is None or planned_shapes != shapes:
            plan = _Plan.like(_plan_own_file(part, name, text := tree_to_json(part.tree)))
        elif not is_same_json(tree, part.tree):
            plan = plan.saying(text := tree_to_json(part.tree))
        self._own_plans[name] = (part.tree, text, shapes, plan)
        return plan.of(part.tensors)


def _moved(entry: TensorEntry, moved_bytes: int) -> TensorEntry:
    (region,) = entry.regions
    return replace(entry, regions=(replace(region, start=region.start + moved_bytes),))


def _shapes_of(part: FlattenedPart) -> _Shapes:
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in part.tensors.items())


def _shares(part: FlattenedPart, world: World) -> list[PlannedFile]:
    bundles = split_into_files(write_items(part.tensors, world))
    numbers = [None] if len(bundles) == 1 else range(len(bundles))
    return [
        _lay_out(shard_name(part.name, world.rank, number), part.name, bundle, {})
        for number, bundle in zip(numbers, bundles, strict=False)
    ]


def own_file(part: FlattenedPart, rank: int) -> str:
    """Return the name of the file of a per-rank part."""
    return rank_part_file(part.name.removesuffix(f"_{rank}"), rank)


def _plan_own_file(part: FlattenedPart, name: str, text: str) -> PlannedFile:
    share = [
        WriteItem(spec_of(name, tensor), whole(tensor.shape), tensor)
        for name, tensor in part.tensors.items()
    ]
    return _lay_out(name, part.name, share, {"state": text})


def _lay_out(
    name: str, part: str, share: Sequence[WriteItem], metadata: dict[str, str]
) -> PlannedFile:
    """Lay regions out as one safetensors file."""
    pieces = {_key_in_file(part, piece.spec, piece.region): piece for piece in share}
    assert len(pieces) == len(share), "a file must not hold a key twice"  # noqa: S101
    slots = [
        TensorSlot(key, piece.spec.dtype, piece.region.lengths) for key, piece in pieces.items()
    ]
    layout = compute_layout(slots, metadata)
    entries = tuple(
        TensorEntry(
            piece.spec.name,
            part,
            piece.spec.dtype,
            piece.spec.shape,
            (StoredRegion(piece.region, name, layout.starts[key], piece.size_bytes),),
        )
        for key, piece in pieces.items()
    )
    return PlannedFile(name, layout, entries, tuple(piece.data for piece in pieces.values()))


def _key_in_file(part: str, spec: TensorSpec, region: Region) -> str:
    """Return the tensor's name inside its part, with the region if the entry is only a piece."""
    path = spec.name.removeprefix(f"{part}/")
    return path if region.is_whole(spec.shape) else f"{path}@{region}"
