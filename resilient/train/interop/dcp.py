"""torch's distributed checkpoints (DCP): a folder of slices and an index of what they hold."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError
from resilient.format.regions import Region, covers
from resilient.train.interop.archives import load_index, load_torch

if TYPE_CHECKING:
    from pathlib import Path

INDEX = ".metadata"


def read_dcp(folder: Path) -> dict[tuple[Any, ...], Any]:
    """Return everything that a distributed checkpoint holds, by path, tensors whole and on the CPU.

    Raises:
        IntegrityError: a file is missing or damaged, or a tensor is not there as a whole.
        IncompatibleCheckpoint: slices were transformed, or the index says no paths.
    """
    index = load_index(folder / INDEX)
    try:
        return _read(folder, index)
    except (AttributeError, TypeError, KeyError) as error:
        raise _damaged(folder, f"its index is none: {error}") from error


def _read(folder: Path, index: Any) -> dict[tuple[Any, ...], Any]:
    paths = getattr(index, "planner_data", None)
    if not isinstance(paths, dict) or not isinstance(index.storage_data, dict):
        raise IncompatibleCheckpoint(
            f"`{folder}` says no names of what it holds: it was not saved by torch's own planner"
        )
    places = {
        (one.fqn, None if one.offset is None else tuple(one.offset)): info
        for one, info in index.storage_data.items()
    }
    found: dict[tuple[Any, ...], Any] = {}
    for key, told in index.state_dict_metadata.items():
        if hasattr(told, "chunks"):
            found[tuple(paths[key])] = _tensor(folder, key, told, places)
        else:
            found[tuple(paths[key])] = _slice(folder, key, places.get((key, None)))
    return found


def _tensor(folder: Path, key: str, told: Any, places: dict[Any, Any]) -> torch.Tensor:
    """Return a tensor put together of its chunks."""
    shape = tuple(told.size)
    regions = [Region(tuple(one.offsets), tuple(one.sizes)) for one in told.chunks]
    if math.prod(shape) and not covers(shape, regions):
        raise _damaged(folder, f"`{key}` is not there as a whole")
    whole = torch.empty(shape, dtype=told.properties.dtype)
    for region in regions:
        data = _slice(folder, key, places.get((key, region.offsets)))
        if not isinstance(data, torch.Tensor) or tuple(data.shape) != region.lengths:
            raise _damaged(folder, f"a slice of `{key}` has not the shape that the index says")
        spans = zip(region.offsets, region.lengths, strict=True)
        whole[tuple(slice(start, start + count) for start, count in spans)] = data
    return whole


def _slice(folder: Path, key: str, info: Any) -> Any:
    """Return what lies in one slice of a file."""
    if info is None:
        raise _damaged(folder, f"the index does not say where `{key}` is")
    if getattr(info, "transform_descriptors", None):
        raise IncompatibleCheckpoint(
            f"`{folder}` was saved through {', '.join(info.transform_descriptors)}, which is not "
            "undone here",
            hint="save it once without extensions of the storage writer",
        )
    file = folder / info.relative_path
    if file.parent != folder:
        raise _damaged(folder, f"the index names `{info.relative_path}`, which is elsewhere")
    try:
        with file.open("rb") as opened:
            opened.seek(info.offset)
            data = opened.read(info.length)
    except FileNotFoundError as error:
        raise _damaged(folder, f"`{file.name}` is missing") from error
    return load_torch(io.BytesIO(data), f"{file}, {key}")


def _damaged(folder: Path, trouble: str) -> IntegrityError:
    return IntegrityError(
        f"`{folder}` is damaged: {trouble}", key=str(folder), hint="take another checkpoint"
    )
