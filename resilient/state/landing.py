"""Where stored tensors land that are sharded here: which boxes to read, and what to fill.

A plain tensor is wanted whole and loaded as before. For a tensor that is spread over the ranks of
the live state, only this rank's boxes are wanted, and they are copied straight into its memory:
no rank ever holds such a tensor whole, whatever layout it was stored in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from resilient.errors import IncompatibleCheckpoint
from resilient.state.dtypes import TORCH_DTYPES
from resilient.state.tree import PLAIN, named_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.extents import Boxes
    from resilient.format.manifest import Manifest, TensorEntry
    from resilient.state.capture import Part
    from resilient.state.placement import Box


@dataclass(frozen=True, slots=True, eq=False)
class Vessel:
    """A sharded tensor to fill, and this rank's boxes of it."""

    tensor: torch.Tensor
    boxes: tuple[Box, ...]


class Landing:
    """The sharded tensors of live parts, by the names under which they are stored.

    A part's state says where its tensors are. A part that has no state before it is loaded, as an
    optimizer before its first step, says it by a method ``like(path)`` instead: it returns a tensor
    of the layout that the one at ``path`` of the part will have, or None.

    Args:
        parts: what will be loaded into; asked for their state once, so on all ranks alike.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts
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
        boxes: Boxes = {}
        for entry in manifest.tensors:
            like = self._like(entry)
            if like is not None:
                boxes[entry.name] = tuple(box.region for box in _boxes_of(like))
        return boxes

    def vessel(self, entry: TensorEntry) -> Vessel | None:
        """Return what to fill with a stored tensor; None if it is wanted whole.

        That is the live tensor itself, or one of the same layout where the live one does not
        exist yet or has another dtype.
        """
        like = self._like(entry)
        if like is None:
            return None
        dtype = TORCH_DTYPES[entry.dtype]
        if entry.name not in self._live or like.dtype != dtype:
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


def _boxes_of(tensor: torch.Tensor) -> tuple[Box, ...]:
    # Only sharded training pays for loading torch's part about it.
    from resilient.state.placement import boxes_of

    return boxes_of(tensor)
