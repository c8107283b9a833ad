"""Locations of whole tensors in the files of the ranks of a DeepSpeed checkpoint.

Source: DeepSpeed 0.19, and the script ``zero_to_fp32.py`` that DeepSpeed writes beside each
checkpoint. ZeRO 1 and 2 concatenate the parameters of a group and split the vector into equal
parts. ZeRO 3 splits each parameter into equal parts, and each rank concatenates its own parts. The
entry ``param_shapes`` has the names and shapes of the parameters, in the order in which they are
concatenated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.format.regions import flat_regions
from resilient.layouts.deepspeed import MODEL_STATES, OPTIMIZER_STATES, shapes_in
from resilient.layouts.json_files import whole
from resilient.layouts.model import MODEL, OPTIMIZER, Tensor, Unreadable
from resilient.layouts.pickle_reader import TensorRef
from resilient.layouts.torch_zip import Archive, open_archive, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.layouts.model import Piece
    from resilient.storage.folder import DirectoryListing, Folder

_CUT_EACH = 3
"""Stage of ZeRO that splits each parameter separately."""
_OTHERWISE = ("round_robin_gradients", "elastic_checkpoint")
MASTER = "fp32"
"""Name of the full-precision weights beside the moments."""
_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Vector:
    """A flat vector of one rank."""

    archive: Archive
    tensor: TensorRef

    @property
    def elements(self) -> int:
        return math.prod(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive elements of one parameter, and their location.

    Attributes:
        start: Index of the first element in the row-major parameter.
        vectors: Vectors, concatenated.
        place: Index of the first element in the concatenated vectors.
        count: Number of elements.
    """

    start: int
    vectors: Sequence[_Vector]
    place: int
    count: int


@dataclass(frozen=True, slots=True)
class _Engine:
    """The files and metadata of one tag of an engine."""

    models: tuple[Archive, ...]
    parts: tuple[Mapping[Any, Any], ...]
    archives: tuple[Archive, ...]
    groups: tuple[_Shapes, ...]
    stage: int

    @property
    def flat(self) -> str:
        """The name of the full-precision weights."""
        cut_each = self.stage == _CUT_EACH
        return "fp32_flat_groups" if cut_each else "single_partition_of_fp32_groups"

    def states(self, rank: int) -> list[Mapping[Any, Any]]:
        """Return the states of a rank's vectors, in order."""
        name = "optimizer_state_dict" if self.stage == _CUT_EACH else "base_optimizer_state"
        base = self.parts[rank].get(name)
        state = base.get("state") if isinstance(base, dict) else None
        if not isinstance(state, dict) or not all(type(key) is int for key in state):
            raise Unreadable("its optimizer's state is not kept by parameter group")
        states = [state[number] for number in sorted(state)]
        return [item if isinstance(item, dict) else {} for item in states]


def gathered(folder: Folder, listing: DirectoryListing, prefix: str) -> tuple[Tensor, ...]:
    """Return the weights and the optimizer's state of an engine, as whole tensors.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        prefix: Folder of the tag in it, with a ``/`` at its end; empty for the folder itself.

    Raises:
        Unreadable: A file is damaged, a rank is missing, or the partitioning is unknown.
        StoreError: A file could not be read.
    """
    engine = _engine(folder, listing, prefix)
    weights = tensors_in(engine.models[0], _field(engine.models[0].value, "module"), MODEL)
    if not engine.stage:
        optimizer = _field(engine.models[0].value, "optimizer")
        return (*weights, *tensors_in(engine.models[0], optimizer, OPTIMIZER))
    vectors = [_vectors(engine, r, engine.parts[r].get(engine.flat)) for r in _ranks(engine)]
    if engine.stage == _CUT_EACH:
        whole_ones = tuple(weight for weight in weights if weight.elements)
        masters = tuple(_cut(engine, vectors, MODEL, "{name}"))
        return (*whole_ones, *masters, *_frozen(engine), *_moments(engine))
    masters = tuple(_cut(engine, vectors, OPTIMIZER, f"state.{{name}}.{MASTER}"))
    return (*weights, *_moments(engine), *masters)


def _engine(folder: Folder, listing: DirectoryListing, prefix: str) -> _Engine:
    names = sorted(file for file in listing.sizes if file.startswith(prefix))
    names = [name for name in names if "/" not in name[len(prefix) :]]
    files = {
        int(match[1]): name
        for name in names
        if (match := OPTIMIZER_STATES.fullmatch(name[len(prefix) :])) and int(match[2]) == 0
    }
    if any("mp_rank_01" in name or "expert" in name for name in names):
        raise Unreadable("its layers were cut over ranks too")
    models = [name for name in names if MODEL_STATES.fullmatch(name[len(prefix) :])]
    opened = tuple(open_archive(folder, listing, model) for model in models)
    if not opened:
        raise Unreadable("the engine's model states are missing")
    first = opened[0].value
    config = _field(_field(first, "ds_config"), "zero_optimization")
    reordering_options = [name for name in _OTHERWISE if _field(config, name)]
    if reordering_options:
        raise Unreadable(
            f"it was saved with `{reordering_options[0]}`, which orders its partitions differently"
        )
    stage = whole(_field(config, "stage")) or 0
    ranks = whole(_field(first, "dp_world_size")) or len(files)
    if stage and (not files or ranks != len(files) or max(files) + 1 != ranks):
        raise Unreadable(f"it has the parts of {len(files)} ranks, but not of all")
    archives = tuple(open_archive(folder, listing, files[rank]) for rank in sorted(files))
    parts = tuple(_dict(_field(archive.value, "optimizer_state_dict")) for archive in archives)
    shapes = _field(first, "param_shapes")
    listed = shapes if isinstance(shapes, list) else [shapes]
    return _Engine(opened, parts, archives, tuple(dict(shapes_in(item)) for item in listed), stage)


def _moments(engine: _Engine) -> Iterator[Tensor]:
    """Yield the optimizer's state of each parameter."""
    states = [engine.states(rank) for rank in _ranks(engine)]
    kinds = dict.fromkeys(kind for state in states[0] for kind in state if isinstance(kind, str))
    for kind in kinds:
        if any(_is_flat(state.get(kind)) for state in states[0]):
            moments_by_kind = [[moment.get(kind) for moment in rank] for rank in states]
            vectors = [
                _vectors(engine, rank, moment) for rank, moment in enumerate(moments_by_kind)
            ]
            yield from _cut(engine, vectors, OPTIMIZER, f"state.{{name}}.{kind}")
            continue
        for nth, group in enumerate(engine.groups):
            # All vectors count the same steps.
            moment = states[0][min(nth, len(states[0]) - 1)].get(kind)
            if isinstance(moment, TensorRef):
                names = [f"state.{name}.{kind}" for name in group]
                yield from (_single(engine.archives[0], moment, name) for name in names)


def _single(archive: Archive, tensor: TensorRef, name: str) -> Tensor:
    pieces = archive.pieces(tensor)
    return Tensor(name, OPTIMIZER, tensor.dtype, tensor.shape, (archive.name,), pieces)


def _is_flat(value: Any) -> bool:
    return isinstance(value, TensorRef) and len(value.shape) > 0


def _vectors(engine: _Engine, rank: int, value: Any) -> list[_Vector]:
    """Return a rank's vectors of one kind, one for each group except with ZeRO 3."""
    tensors = value if isinstance(value, list | tuple) else []
    vectors = [
        _Vector(engine.archives[rank], tensor)
        for tensor in tensors
        if isinstance(tensor, TensorRef)
    ]
    if len(vectors) != len(tensors) or not vectors:
        raise Unreadable(f"`{engine.archives[rank].name}` lacks a part of its optimizer's state")
    if engine.stage != _CUT_EACH and len(vectors) != len(engine.groups):
        raise Unreadable(f"`{engine.archives[rank].name}` has other groups than the model")
    return vectors


def _cut(
    engine: _Engine, vectors: Sequence[Sequence[_Vector]], part: str, parameter_name: str
) -> Iterator[Tensor]:
    """Yield the parameters from the vectors of one kind of each rank."""
    place = 0
    for nth, group in enumerate(engine.groups):
        place = place if engine.stage == _CUT_EACH else 0
        for name, shape in group.items():
            count = math.prod(shape)
            if engine.stage == _CUT_EACH:
                width = math.ceil(count / len(vectors))
                runs = list(_shares(vectors, place, width, count))
            else:
                width = count
                runs = [_Run(0, [ranks[nth] for ranks in vectors], place, count)]
            yield _whole(parameter_name.replace("{name}", name), part, shape, runs)
            place += width


def _shares(
    vectors_by_rank: Sequence[Sequence[_Vector]], place: int, width: int, count: int
) -> Iterator[_Run]:
    """Yield the run of each rank, without padding."""
    for rank, vectors in enumerate(vectors_by_rank):
        own_elements = min(width, count - rank * width)
        if own_elements > 0:
            yield _Run(rank * width, vectors, place, own_elements)


def _whole(name: str, part: str, shape: tuple[int, ...], runs: Iterable[_Run]) -> Tensor:
    pieces = [piece for run in runs for piece in _pieces(name, shape, run)]
    files = tuple(dict.fromkeys(piece.file for piece in pieces))
    dtypes = {vector.tensor.dtype for run in runs for vector in run.vectors}
    if len(dtypes) != 1:
        raise Unreadable(f"`{name[:80]}` is of a different dtype on each rank")
    return Tensor(name, part, dtypes.pop(), shape, files, tuple(pieces))


def _pieces(name: str, shape: tuple[int, ...], run: _Run) -> Iterator[Piece]:
    start, place, remaining_elements = run.start, run.place, run.count
    for vector in run.vectors:
        piece_elements = min(remaining_elements, vector.elements - place)
        if piece_elements > 0:
            yield from _boxes(shape, start, vector, place, piece_elements)
            start, remaining_elements = start + piece_elements, remaining_elements - piece_elements
        place = max(0, place - vector.elements)
    if remaining_elements:
        raise Unreadable(f"its parts end before `{name[:80]}`")


def _boxes(
    shape: tuple[int, ...], start: int, vector: _Vector, place: int, count: int
) -> Iterator[Piece]:
    """Yield the boxes of a run of elements, each contiguous in its file."""
    pieces = vector.archive.pieces(vector.tensor)
    if not pieces:
        raise Unreadable(f"`{vector.archive.name}` lacks its bytes")
    for box in flat_regions(shape, start, count):
        yield replace(pieces[0], region=box, first=pieces[0].first + place, strides=None)
        place += box.size


def _frozen(engine: _Engine) -> Iterator[Tensor]:
    """Yield the frozen parameters, which ZeRO 3 splits over the ranks."""
    for name, shape in shapes_in(_field(engine.models[0].value, "frozen_param_shapes")):
        fragments = [
            (model, _field(_field(model.value, "frozen_param_fragments"), name))
            for model in engine.models
        ]
        vectors = [
            _Vector(item, tensor) for item, tensor in fragments if isinstance(tensor, TensorRef)
        ]
        yield _whole(name, MODEL, shape, [_Run(0, vectors, 0, math.prod(shape))])


def _ranks(engine: _Engine) -> range:
    return range(len(engine.parts))


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _dict(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}
