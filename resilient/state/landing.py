"""Where stored tensors land that are sharded here: which boxes to read, and what to fill.

A plain tensor is wanted whole. For a tensor that is spread over the ranks of the live state, only
this rank's boxes are wanted, and they come straight into its memory: no rank ever holds such a
tensor whole, whatever layout it was stored in.

Live tensors are filled when all ranks have proved what they read; with ``in_place`` those of
:mod:`resilient.state.berths` are read into, and proved where they lie.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from resilient.errors import IncompatibleCheckpoint
from resilient.format.regions import whole
from resilient.state.berths import berths_of, fitting
from resilient.state.boxes import Box, places_in
from resilient.state.dtypes import TORCH_DTYPES
from resilient.state.flat import FlatShard
from resilient.state.tree import PLAIN, named_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from resilient.format.extents import Boxes, Place, PlacesByFile
    from resilient.format.manifest import Manifest, TensorEntry
    from resilient.state.berths import Berths
    from resilient.state.capture import Part


IN_PLACE_BYTES_MIN = 64 << 10
"""A smaller tensor is copied: its piece of a read would cost more than that."""


@dataclass(frozen=True, slots=True, eq=False)
class Vessel:
    """A tensor to fill, and this rank's boxes of it."""

    tensor: torch.Tensor
    boxes: tuple[Box, ...]


class Landing:
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
        self._berths = berths_of(parts) if in_place else {}
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
        self._berthed = fitting(self._berths, manifest)
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
        self._berthed = fitting(self._berths, manifest)
        found: dict[str, list[Place]] = defaultdict(list)
        for entry in manifest.tensors:
            live = self._berthed.get(entry.name)
            if live is not None and live.nbytes >= IN_PLACE_BYTES_MIN:
                for file, place in places_in(entry, _boxes_of(live)):
                    found[file].append(place)
        tangled = _tangled(manifest, found)
        return {
            file: sorted(places, key=lambda place: place.start)
            for file, places in found.items()
            if file not in tangled
        }

    def vessel(self, entry: TensorEntry) -> Vessel | None:
        """Return what to fill with a stored tensor; None if it is wanted whole.

        That is the live tensor itself, or one of the same layout where the live one does not
        exist yet or has another dtype.
        """
        live = self._berthed.get(entry.name)
        if live is not None:
            return Vessel(live, _boxes_of(live))
        like = self._like(entry)
        if like is None:
            return None
        dtype = TORCH_DTYPES[entry.dtype]
        is_there = entry.name in self._live or isinstance(like, FlatShard)
        if not is_there or like.dtype != dtype:
            like = torch.empty_like(like.detach(), dtype=dtype)
        return Vessel(like, _boxes_of(like))

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


def _boxes_of(tensor: torch.Tensor) -> tuple[Box, ...]:
    if type(tensor) in PLAIN:
        return (Box(whole(tensor.shape), tensor.detach()),)
    # Only sharded training pays for loading torch's part about it.
    from resilient.state.placement import boxes_of

    return boxes_of(tensor)
