"""Files that were read in part: which chunks a load touches, and what was read of them."""

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
"""By tensor name, the boxes of it that are wanted; a tensor that is not named is wanted whole."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Memory that wants bytes of a file as they lie there.

    Attributes:
        start: offset of the first byte in the file.
        memory: flat, writable; as long as what is wanted.
    """

    start: int
    memory: memoryview

    @property
    def stop(self) -> int:
        """Offset of the byte behind the last."""
        return self.start + len(self.memory)


PlacesByFile = Mapping[str, Sequence[ReadTarget]]
"""By file name, places in the order of the file; they share no byte of it and no memory."""


@dataclass(frozen=True, slots=True)
class PartialFile:
    """The parts of a file that were read, each held against its digests.

    Attributes:
        starts: offset of each part in the file, bytes, ascending. Parts that touch lie apart in
            memory.
        parts: their bytes.
    """

    starts: tuple[int, ...]
    parts: tuple[bytes | memoryview, ...]

    def __len__(self) -> int:
        """Return how many bytes were read."""
        return sum(map(len, self.parts))

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return what was read: (first byte, byte after the last), as long as they can be."""
        found: list[tuple[int, int]] = []
        for start, part in zip(self.starts, self.parts, strict=True):
            first = found.pop()[0] if found and found[-1][1] == start else start
            found.append((first, start + len(part)))
        return found

    def view(self, start: int, length: int) -> memoryview:
        """Return bytes of the file, copying nothing.

        Raises:
            LookupError: they were not read, or not into one piece of memory.
        """
        index = bisect_right(self.starts, start) - 1
        begin = start - self.starts[index] if index >= 0 else -1
        if begin < 0 or begin + length > len(self.parts[index]):
            raise LookupError(f"bytes {start} to {start + length} were not read")
        return memoryview(self.parts[index])[begin : begin + length]


Content = bytes | PartialFile
"""All of a file, or what was read of it."""


def view_of(content: Content | memoryview, start: int, length: int) -> memoryview:
    """Return ``length`` bytes of a file from ``start``, copying nothing.

    Raises:
        IntegrityError: the file ends before.
        LookupError: they were not read.
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
    """Yield where what ``stored`` holds of ``box`` lies in its file.

    The same cuts for planning what to read and for reading from it.

    Yields:
        (part of the box in global coordinates, first byte in the file, bytes). Inside, elements
        lie with the strides of the stored region.
    """
    shared = intersect(stored.region, box)
    if shared is None:
        return
    for part, first, count in spans(stored.region, shared, max(CHUNK_BYTES // item_bytes, 1)):
        yield part, stored.start + first * item_bytes, count * item_bytes


def chunks_touched(tensors: Iterable[TensorEntry], boxes: Boxes) -> dict[str, set[int]]:
    """Return by file name the numbers of the chunks that hold what is wanted of ``tensors``.

    Files of our own none of whose tensors are named in ``boxes`` are left out: they are wanted
    whole. Of a file in an older checkpoint's folder only what is referred to is wanted.
    """
    tensors = list(tensors)
    partial = {
        one.file
        for tensor in tensors
        for one in tensor.regions
        if tensor.name in boxes or origin_of(one.file)
    }
    touched: dict[str, set[int]] = {file: set() for file in partial}
    for tensor in tensors:
        item = ITEM_BYTES[tensor.dtype]
        for stored in tensor.regions:
            if stored.file not in partial:
                continue
            for box in boxes.get(tensor.name, (stored.region,)):
                for _, start, length in stored_spans(stored, box, item):
                    last = (start + length - 1) // CHUNK_BYTES
                    touched[stored.file].update(range(start // CHUNK_BYTES, last + 1))
    return touched


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs of consecutive ones: (first, how many)."""
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
            one.file == file and one.start < stop and start < one.start + one.size_bytes
            for one in tensor.regions
            for start, stop in ranges
        )
    ]


def read_bytes(files: Mapping[str, Content]) -> int:
    """Return how many bytes were read of all files together."""
    return sum(map(len, files.values()))
