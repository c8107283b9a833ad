"""Layout of a safetensors file, and sources of the bytes of a file in a save.

The bytes of a file are in host memory (staged), or are copied from the tensors at each request
(streamed). A reduced file is a staged file without some of its tensors.

The layout follows the safetensors format description. A file begins with the length of the header,
a little-endian number of 8 bytes. A JSON header and the tensors follow, without holes. Spaces pad
the header to a multiple of 8 bytes, or of 64 bytes in a large file. Tensors are in descending order
of item size, so each tensor starts at a multiple of its item size.
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
# Alignment of torch's memory: a tensor can then use the memory that its file was read into.
_LARGE_ALIGNMENT, _LARGE_BYTES = 64, 1 << 20


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor, or one region of a tensor, to lay out in a file.

    Attributes:
        key: Name inside the file.
        dtype: Name in :data:`resilient.format.regions.ITEM_BYTES`.
        shape: Elements per axis.
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
    """Layout of one file.

    Attributes:
        head: Length and JSON header, ready to copy to the file's start.
        starts: Offset of each slot's data from the file's start, in bytes.
        size_bytes: Length of the whole file.
    """

    head: bytes
    starts: Mapping[str, int]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of one rank in host memory, as passed from tensors to storage.

    Attributes:
        name: File name inside the checkpoint's folder.
        data: Whole content; it does not change until the save is over.
        tensors: Tensors in the file, one region each, with offsets into ``data``.
    """

    name: str
    data: bytes | memoryview
    tensors: tuple[TensorEntry, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Length of the content in bytes."""
        return len(self.data)

    def lend(self) -> AbstractContextManager[bytes | memoryview]:
        """Return the content, valid only inside the context."""
        return nullcontext(self.data)


class FileContent(Protocol):
    """A file whose content may be produced or fetched at each request."""

    @property
    def name(self) -> str:
        """File name inside the checkpoint's folder."""

    @property
    def size_bytes(self) -> int:
        """Length of the content in bytes."""

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Tensors in the file, with offsets into the content."""

    def lend(self) -> AbstractContextManager[bytes | memoryview]:
        """Return the content, valid only inside the context; the memory is reused afterwards."""


@dataclass(frozen=True, slots=True)
class StreamedFile:
    """One file of one rank without memory: its bytes are copied at each request.

    Attributes:
        name: File name inside the checkpoint's folder.
        size_bytes: Length in bytes.
        tensors: Tensors in the file, one region each, with offsets into the content.
        fill: Function that writes the whole content into memory of that length; the same content
            until the save is over.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    fill: Callable[[memoryview], None]

    @contextmanager
    def lend(self) -> Iterator[memoryview]:
        """Yield the content in temporary memory, which is freed afterwards."""
        data = memoryview(bytearray(self.size_bytes))
        self.fill(data)
        yield data


def compute_layout(slots: Sequence[TensorSlot], metadata: Mapping[str, str]) -> FileLayout:
    """Compute the layout of a safetensors file with ``slots``.

    Args:
        slots: Slots with distinct keys, in any order.
        metadata: Strings for the header's ``__metadata__``.
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
    assert len(relative) == len(slots), "a file must not hold a key twice"  # noqa: S101
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
        IntegrityError: The header is cut short, too large or not JSON.
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
    """A staged file without some of its tensors; its bytes are assembled on request.

    Attributes:
        name: File name inside the checkpoint's folder.
        size_bytes: Length in bytes.
        tensors: Remaining tensors, with offsets into the reduced file.
        head: Length and header.
        moves: (first byte here, first byte in ``staged``, bytes) of each tensor.
        staged: Whole content of the staged file.
    """

    name: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]
    head: bytes
    moves: tuple[tuple[int, int, int], ...]
    staged: bytes | memoryview

    @property
    def data(self) -> memoryview:
        """The content, copied at each call: memory of one file while it is in use."""
        data, source_view = memoryview(bytearray(self.size_bytes)), memoryview(self.staged)
        data[: len(self.head)] = self.head
        for target, source, length in self.moves:
            data[target : target + length] = source_view[source : source + length]
        return data

    def lend(self) -> AbstractContextManager[memoryview]:
        """Return the content, valid only inside the context."""
        return nullcontext(self.data)


def reduce_file(file: StagedFile, starts: Collection[int]) -> ReducedFile:
    """Remove the tensors whose data begins at ``starts`` from a file.

    The other tensors keep their order, and the header its metadata.

    Args:
        file: Staged file.
        starts: Offsets in the file, in bytes, of non-empty tensors.

    Raises:
        IntegrityError: The file has no header of safetensors.
    """
    header, base = read_header(file.data, file.name)
    metadata = header.pop("__metadata__", {})
    places = {
        key: tuple(base + end for end in value["data_offsets"]) for key, value in header.items()
    }
    kept_keys = [
        key for key, (start, stop) in places.items() if start == stop or start not in starts
    ]
    slots = [
        TensorSlot(key, header[key]["dtype"], tuple(header[key]["shape"])) for key in kept_keys
    ]
    layout = compute_layout(slots, metadata)
    moves = tuple(
        (layout.starts[key], places[key][0], places[key][1] - places[key][0]) for key in kept_keys
    )
    # An empty tensor may begin at the offset of another tensor; then both keep a common offset.
    target_by_source = {source: target for target, source, _ in moves}
    tensors = tuple(
        replace(tensor, regions=(replace(region, start=target_by_source[region.start]),))
        for tensor in file.tensors
        for region in tensor.regions
        if not region.size_bytes or region.start not in starts
    )
    return ReducedFile(file.name, layout.size_bytes, tensors, layout.head, moves, file.data)
