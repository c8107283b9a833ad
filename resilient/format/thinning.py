"""A staged file without some of its tensors: as valid a safetensors file, and shorter."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.format.shard import Slot, lay_out, read_header

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager

    from resilient.format.manifest import TensorEntry
    from resilient.format.shard import HostFile


@dataclass(frozen=True, slots=True)
class ThinFile:
    """What is left of a staged file; its bytes are put together only when they are asked for.

    Attributes:
        name: file name inside the checkpoint's folder.
        size_bytes: its length.
        tensors: what it still holds, with offsets into the file as it will be.
        head: the length and the header.
        moves: (first byte here, first byte in ``staged``, bytes) of each tensor.
        staged: the whole content as it was staged.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    head: bytes
    moves: tuple[tuple[int, int, int], ...]
    staged: bytes | memoryview

    @property
    def data(self) -> memoryview:
        """The content, copied anew at each call: one file's memory, for as long as it is used."""
        data, staged = memoryview(bytearray(self.size_bytes)), memoryview(self.staged)
        data[: len(self.head)] = self.head
        for target, source, length in self.moves:
            data[target : target + length] = staged[source : source + length]
        return data

    def lend(self) -> AbstractContextManager[memoryview]:
        """Return the content, to look at inside."""
        return nullcontext(self.data)


def without(file: HostFile, starts: Collection[int]) -> ThinFile:
    """Return a file that lacks the tensors whose data begin at ``starts``.

    The others keep their order, and the header its metadata.

    Args:
        file: as it was staged.
        starts: offsets in the file, bytes, of tensors that are not empty.

    Raises:
        IntegrityError: the file has no header of safetensors.
    """
    header, base = read_header(file.data, file.name)
    metadata = header.pop("__metadata__", {})
    places = {key: tuple(base + end for end in one["data_offsets"]) for key, one in header.items()}
    kept = [key for key, (start, stop) in places.items() if start == stop or start not in starts]
    slots = [Slot(key, header[key]["dtype"], tuple(header[key]["shape"])) for key in kept]
    layout = lay_out(slots, metadata)
    moves = tuple(
        (layout.starts[key], places[key][0], places[key][1] - places[key][0]) for key in kept
    )
    # An empty tensor may begin where another does: then both begin at one place again.
    moved = {source: target for target, source, _ in moves}
    tensors = tuple(
        replace(tensor, regions=(replace(one, start=moved[one.start]),))
        for tensor in file.tensors
        for one in tensor.regions
        if not one.size_bytes or one.start not in starts
    )
    return ThinFile(file.name, layout.size_bytes, tensors, layout.head, moves, file.data)
