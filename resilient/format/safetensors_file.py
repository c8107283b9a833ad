"""Safetensors layout of one file, host/streamed/reduced files.

Files of a checkpoint as bytes: the safetensors layout, and what crosses to the storage side.

Source of the layout: the safetensors format description. Eight bytes little-endian header
length, a JSON header padded with spaces, then the tensors without holes. We pad the header to
eight bytes, of a large file to 64, and order tensors by falling item size, so each starts at a
multiple of its item size.

A staged file without some of its tensors: as valid a safetensors file, and shorter.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from resilient.errors import IntegrityError
from resilient.format.regions import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from resilient.format.manifest import TensorEntry

_HEADER_BYTES_MAX = 100 << 20
_ALIGNMENT = 8
# What memory of torch begins at: a tensor may then lie where its file was read.
_LARGE_ALIGNMENT, _LARGE_BYTES = 64, 1 << 20


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor, or one region of it, to lay out in a file.

    Attributes:
        key: its name inside the file.
        dtype: a name of :data:`resilient.format.regions.ITEM_BYTES`.
        shape: elements per axis.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Length of its data in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where everything of one file goes.

    Attributes:
        head: the length and the JSON header, ready to copy to the file's start.
        starts: offset of each slot's data from the file's start, in bytes.
        size_bytes: length of the whole file.
    """

    head: bytes
    starts: Mapping[str, int]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of one rank in host memory: what crosses from tensors to storage.

    Attributes:
        name: file name inside the checkpoint's folder.
        data: the whole content; nobody changes it until the save is over.
        tensors: what it holds, one region each, with offsets into ``data``.
    """

    name: str
    data: bytes | memoryview
    tensors: tuple[TensorEntry, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return len(self.data)

    def lend(self) -> AbstractContextManager[bytes | memoryview]:
        """Return the content, to look at inside."""
        return nullcontext(self.data)


class FileContent(Protocol):
    """A file whose content may have to be made, or fetched, each time it is asked for."""

    @property
    def name(self) -> str:
        """File name inside the checkpoint's folder."""

    @property
    def size_bytes(self) -> int:
        """Its length."""

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """What it holds, with offsets into the content."""

    def lend(self) -> AbstractContextManager[bytes | memoryview]:
        """Return the content, to look at inside: outside its memory is somebody else's."""


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """One file of one rank that has no memory: its bytes are copied each time they are asked for.

    Attributes:
        name: file name inside the checkpoint's folder.
        size_bytes: its length.
        tensors: what it holds, one region each, with offsets into the content.
        fill: writes the whole content into so much memory; the same until the save is over.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    fill: Callable[[memoryview], None]

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Yield the content, in memory of its own that is gone afterwards."""
        data = memoryview(bytearray(self.size_bytes))
        self.fill(data)
        yield data


def compute_layout(slots: Sequence[TensorSlot], metadata: Mapping[str, str]) -> FileLayout:
    """Return the layout of a safetensors file that holds ``slots``.

    Args:
        slots: distinct keys, any order.
        metadata: strings for the header's ``__metadata__``.
    """
    ordered = sorted(slots, key=lambda slot: (-ITEM_BYTES[slot.dtype], slot.key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    relative: dict[str, int] = {}
    end = 0
    for slot in ordered:
        relative[slot.key] = end
        end += slot.size_bytes
        header[slot.key] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [relative[slot.key], end],
        }
    assert len(relative) == len(slots), "a file never holds one key twice"  # noqa: S101
    text = json.dumps(header, separators=(",", ":")).encode()
    alignment = _LARGE_ALIGNMENT if end >= _LARGE_BYTES else _ALIGNMENT
    text += b" " * (-(_ALIGNMENT + len(text)) % alignment)
    head = len(text).to_bytes(_ALIGNMENT, "little") + text
    return FileLayout(
        head, {key: len(head) + start for key, start in relative.items()}, len(head) + end
    )


def read_header(data: bytes | memoryview, key: str) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and the offset where its data begins.

    Raises:
        IntegrityError: the header is cut short, too large or not JSON.
    """
    size = int.from_bytes(bytes(data[:8]), "little")
    if len(data) < 8 or size > min(_HEADER_BYTES_MAX, len(data) - 8):  # noqa: PLR2004
        raise IntegrityError(f"`{key}`: its header is cut short", key=key)
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"`{key}`: its header is not JSON", key=key) from error
    if not isinstance(header, dict):
        raise IntegrityError(f"`{key}`: its header is not an object", key=key)
    return header, 8 + size


@dataclass(frozen=True, slots=True)
class ReducedFile:
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


def reduce_file(file: StagedFile, starts: Collection[int]) -> ReducedFile:
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
    slots = [TensorSlot(key, header[key]["dtype"], tuple(header[key]["shape"])) for key in kept]
    layout = compute_layout(slots, metadata)
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
    return ReducedFile(file.name, layout.size_bytes, tensors, layout.head, moves, file.data)
