"""Which files a save becomes and where each tensor goes in them; planned once for saves alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.format.manifest import StoredRegion, TensorEntry
from resilient.format.names import rank_part_file, shard_name
from resilient.format.regions import Region, whole
from resilient.format.shard import Slot, StreamedFile, lay_out
from resilient.state.bundles import bundled
from resilient.state.copying import target_in
from resilient.state.recall import Kept
from resilient.state.shares import Piece, box_of, share_of, spec_of
from resilient.state.spelling import is_spelled_alike, text_of
from resilient.state.tree import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from resilient.format.shard import Layout
    from resilient.state.capture import CapturedPart, Snapshot
    from resilient.state.partition import TensorSpec
    from resilient.world.world import World

_Shapes = tuple[tuple[str, "torch.dtype", "torch.Size"], ...]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Draft:
    """A file that has a layout and no bytes yet.

    Attributes:
        name: file name inside the checkpoint's folder.
        layout: where everything of it goes.
        entries: what the manifest says of its tensors, one region each.
        sources: the elements of each entry's region; they share memory with training.
    """

    name: str
    layout: Layout
    entries: tuple[TensorEntry, ...]
    sources: tuple[torch.Tensor, ...]

    def targets(self, buffer: memoryview) -> tuple[torch.Tensor, ...]:
        """Return where the sources go in the file's memory."""
        return tuple(
            target_in(buffer, entry.regions[0].start, source)
            for entry, source in zip(self.entries, self.sources, strict=True)
        )

    def streamed(self) -> StreamedFile:
        """Return the file without memory."""
        return StreamedFile(self.name, self.layout.size_bytes, self.entries, self._fill)

    def _fill(self, buffer: memoryview) -> None:
        buffer[: len(self.layout.head)] = self.layout.head
        for source, target in zip(self.sources, self.targets(buffer), strict=True):
            target.copy_(source)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A Draft without its sources.

    Attributes:
        boxes: which tensor each entry is of, and which box of it; None is all of it.
    """

    name: str
    layout: Layout
    entries: tuple[TensorEntry, ...]
    boxes: tuple[tuple[str, Region | None], ...]

    @classmethod
    def like(cls, draft: Draft) -> _Plan:
        """Return how a file was laid out."""
        boxes = ((one, one.regions[0].region) for one in draft.entries)
        picks = ((one.name, None if box.is_whole(one.shape) else box) for one, box in boxes)
        return cls(draft.name, draft.layout, draft.entries, tuple(picks))

    def saying(self, text: str) -> _Plan:
        """Return the plan with other values in the header, which may move all tensors alike.

        Args:
            text: of the values of a part that a rank has for itself.
        """
        slots = [
            Slot(one.name.removeprefix(f"{one.part}/"), one.dtype, one.shape)
            for one in self.entries
        ]
        layout = lay_out(slots, {"state": text})
        moved_bytes = layout.size_bytes - self.layout.size_bytes
        if not moved_bytes:
            return replace(self, layout=layout)
        entries = tuple(_moved(one, moved_bytes) for one in self.entries)
        return replace(self, layout=layout, entries=entries)

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Draft:
        """Return the file of this save."""
        sources = tuple(
            tensors[name] if box is None else box_of(tensors[name], box) for name, box in self.boxes
        )
        return Draft(self.name, self.layout, self.entries, sources)


class Drafts:
    """Remembers how a part was laid out, for the next save that is like it.

    What a part becomes depends on the names, types and shapes of its tensors alone, unless they
    are spread over ranks, which are planned anew; the header of a part that each rank has for
    itself has its other values in it besides.
    No tensor is remembered here; of tensors that are known again the files are the same objects.
    """

    def __init__(self) -> None:
        self._own: dict[str, tuple[Any, str, _Shapes, _Plan]] = {}
        self._plans: dict[str, tuple[World, _Shapes, list[_Plan]]] = {}

    def of(self, snapshot: Snapshot, world: World) -> list[Draft]:
        """Return the files with tensors that this rank writes of a snapshot; nothing is copied.

        Crash: nothing was stored.

        Args:
            snapshot: state of this rank.
            world: who this rank is.
        """
        drafts = []
        for part in snapshot.parts:
            if part.scope == "replicated":
                drafts += self._share(part, world)
        own = [part for part in snapshot.parts if part.scope == "rank"]
        return drafts + [self._own_draft(part, world.rank) for part in own]

    def _share(self, part: CapturedPart, world: World) -> list[Draft]:
        if not isinstance(part.tensors, Kept):
            return self._planned(part, world)
        drafts = part.tensors.drafts
        if world not in drafts:
            drafts[world] = self._planned(part, world)
        return drafts[world]

    def _planned(self, part: CapturedPart, world: World) -> list[Draft]:
        if any(type(one) not in PLAIN for one in part.tensors.values()):
            return _shares(part, world)
        shapes = _shapes_of(part)
        known = self._plans.get(part.name)
        if known is None or known[:2] != (world, shapes):
            plans = [_Plan.like(one) for one in _shares(part, world)]
            known = self._plans[part.name] = (world, shapes, plans)
        return [plan.of(part.tensors) for plan in known[2]]

    def _own_draft(self, part: CapturedPart, rank: int) -> Draft:
        name, shapes = own_file(part, rank), _shapes_of(part)
        tree, text, before, plan = self._own.get(name, (None, "", None, None))
        if plan is None or before != shapes:
            plan = _Plan.like(_own(part, name, text := text_of(part.tree)))
        elif not is_spelled_alike(tree, part.tree):
            plan = plan.saying(text := text_of(part.tree))
        self._own[name] = (part.tree, text, shapes, plan)
        return plan.of(part.tensors)


def _moved(entry: TensorEntry, moved_bytes: int) -> TensorEntry:
    (region,) = entry.regions
    return replace(entry, regions=(replace(region, start=region.start + moved_bytes),))


def _shapes_of(part: CapturedPart) -> _Shapes:
    return tuple((name, one.dtype, one.shape) for name, one in part.tensors.items())


def _shares(part: CapturedPart, world: World) -> list[Draft]:
    bundles = bundled(share_of(part.tensors, world))
    numbers = [None] if len(bundles) == 1 else range(len(bundles))
    return [
        _lay_out(shard_name(part.name, world.rank, number), part.name, bundle, {})
        for number, bundle in zip(numbers, bundles, strict=False)
    ]


def own_file(part: CapturedPart, rank: int) -> str:
    """Return the name of the file of a part that each rank has for itself."""
    return rank_part_file(part.name.removesuffix(f"_{rank}"), rank)


def _own(part: CapturedPart, name: str, text: str) -> Draft:
    share = [
        Piece(spec_of(name, tensor), whole(tensor.shape), tensor)
        for name, tensor in part.tensors.items()
    ]
    return _lay_out(name, part.name, share, {"state": text})


def _lay_out(name: str, part: str, share: Sequence[Piece], metadata: dict[str, str]) -> Draft:
    """Lay regions out as one safetensors file."""
    pieces = {_key_in_file(part, piece.spec, piece.region): piece for piece in share}
    assert len(pieces) == len(share), "a file never holds one key twice"  # noqa: S101
    slots = [Slot(key, piece.spec.dtype, piece.region.lengths) for key, piece in pieces.items()]
    layout = lay_out(slots, metadata)
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
    return Draft(name, layout, entries, tuple(piece.data for piece in pieces.values()))


def _key_in_file(part: str, spec: TensorSpec, region: Region) -> str:
    """Return the tensor's name as its own part knows it, with the region if it is only a piece."""
    path = spec.name.removeprefix(f"{part}/")
    return path if region.is_whole(spec.shape) else f"{path}@{region}"
