"""Partial reads of checkpoint files: the chunks that a load needs, and the bytes that were read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError
from resilient.format.digest import CHUNK_BYTES
from resilient.format.keys import origin_of
from resilient.format.regions import ITEM_BYTES, Region, intersect, spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.format.manifest import StoredRegion, TensorEntry

Boxes = dict[str, tuple[Region, ...]]
"""Wanted boxes by tensor name; a tensor without an entry is wanted whole."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Memory for bytes of a file in their stored layout.

    Attributes:
        start: Offset of the first byte in the file.
        memory: Flat, writable memory, as long as the wanted bytes.
    """

    start: int
    memory: memoryview

    @property
    def stop(self) -> int:
        """Offset after the last byte."""
        return self.start + len(self.memory)


PlacesByFile = Mapping[str, Sequence[ReadTarget]]
"""Read targets by file name, sorted by offset. No two targets share a byte of file or memory."""


@dataclass(frozen=True, slots=True)
class PartialFile:
    """Parts of a file that were read and verified.

    Attributes:
        starts: Offset of each part in the file, in bytes, ascending. Adjacent parts are separate in
            memory.
        parts: Bytes of the parts.
    """

    starts: tuple[int, ...]
    parts: tuple[bytes | memoryview, ...]

    def __len__(self) -> int:
        """Return how many bytes were read."""
        return sum(map(len, self.parts))

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges that were read, merged: (first byte, byte after the last)."""
        ranges: list[tuple[int, int]] = []
        for start, part in zip(self.starts, self.parts, strict=True):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((first, start + len(part)))
        return ranges

    def view(self, start: int, length: int) -> memoryview:
        """Return bytes of the file, without a copy.

        Raises:
            LookupError: The bytes were not read, or were read into separate pieces of memory.
        """
        index = bisect_right(self.starts, start) - 1
        begin = start - self.starts[index] if index >= 0 else -1
        if begin < 0 or begin + length > len(self.parts[index]):
            raise LookupError(f"bytes {start} to {start + length} were not read")
        return memoryview(self.parts[index])[begin : begin + length]


Content = bytes | PartialFile
"""A whole file, or the parts of it that were read."""


def view_of(content: Content | memoryview, start: int, length: int) -> memoryview:
    """Return ``length`` bytes of a file from ``start``, without a copy.

    Raises:
        IntegrityError: The file ends earlier.
        LookupError: The bytes were not read.
    """
    if isinstance(content, PartialFile):
        return content.view(start, length)
    view = memoryview(content)[start : start + length]
    if len(view) != length:
        raise IntegrityError(f"a file ends before its byte {start + length}")
    return view


def stored_spans(
    stored: StoredRegion, box: Region, item_bytes: int
) -> Iterator[tuple[Region, int, int]]:
    """Yield the file ranges of the parts of ``box`` that ``stored`` contains.

    The planner of a read and the reader both call this function, so they divide a box in the same
    way.

    Yields:
        (part of the box in global coordinates, first byte in the file, bytes). In a range, the
        elements have the strides of the stored region.
    """
    overlap = intersect(stored.region, box)
    if overlap is None:
        return
    for part, first, count in spans(stored.region, overlap, max(CHUNK_BYTES // item_bytes, 1)):
        yield part, stored.start + first * item_bytes, count * item_bytes


def chunks_touched(tensors: Iterable[TensorEntry], boxes: Boxes) -> dict[str, set[int]]:
    """Return by file name the numbers of the chunks that contain the wanted boxes of ``tensors``.

    Files of this checkpoint without a tensor in ``boxes`` are left out, because they are wanted
    whole. Of a file in an older checkpoint's folder, only the referenced bytes are wanted.
    """
    tensors = list(tensors)
    partial = {
        region.file
        for tensor in tensors
        for region in tensor.regions
        if tensor.name in boxes or origin_of(region.file)
    }
    chunks_by_file: dict[str, set[int]] = {file: set() for file in partial}
    for tensor in tensors:
        item = ITEM_BYTES[tensor.dtype]
        for stored_region in tensor.regions:
            if stored_region.file not in partial:
                continue
            for box in boxes.get(tensor.name, (stored_region.region,)):
                for _, start, length in stored_spans(stored_region, box, item):
                    last = (start + length - 1) // CHUNK_BYTES
                    chunks_by_file[stored_region.file].update(range(start // CHUNK_BYTES, last + 1))
    return chunks_by_file


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs of consecutive numbers: (first, count)."""
    ordered = enumerate(sorted(numbers))
    grouped = [
        [number for _, number in run]
        for _, run in groupby(ordered, key=lambda pair: pair[1] - pair[0])
    ]
    return [(run[0], len(run)) for run in grouped]


def names_in(
    tensors: Iterable[TensorEntry], file: str, ranges: Sequence[tuple[int, int]]
) -> list[str]:
    """Return the tensors with bytes in one of the ranges (start, stop) of ``file``."""
    return [
        tensor.name
        for tensor in tensors
        if any(
            region.file == file and region.start < stop and start < region.start + region.size_bytes
            for region in tensor.regions
            for start, stop in ranges
        )
    ]


def read_bytes(files: Mapping[str, Content]) -> int:
    """Return the number of bytes read from all files together."""
    return sum(map(len, files.values()))
