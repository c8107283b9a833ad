"""What ranks printed, read again: of all lives, from the end, and on as it comes.

No file is ever held in memory: the place to begin at is found from the end or by halving, and
the lines of the ranks of one life are then read side by side, in the order of their times.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING, BinaryIO

from resilient.agent.outputs.line import LINE_BYTES_MAX, Line, parse_line
from resilient.storage.folder import open_inside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_BLOCK_BYTES = 1 << 16
_FOLLOWED_BYTES = 1 << 20
_NAME = re.compile(r"rank-(\d{1,9})\.log")


@dataclass(frozen=True, slots=True)
class Source:
    """What one rank printed in one life.

    Attributes:
        life: 1 for the first, over all launches.
        attempt: the life's folder.
        rank: among all ranks.
        path: of the file.
        root: the folder that the user named; the file is read only if it lies in it.
    """

    life: int
    attempt: str
    rank: int
    path: Path
    root: Path


@dataclass(frozen=True, slots=True)
class Printed:
    """A line, and who printed it."""

    source: Source
    line: Line


@dataclass(slots=True)
class Reader:
    """Reads lines of files, each from where it was left.

    Attributes:
        tail: of what is there, only so many last lines; None for all.
        since: nothing from before this time, as ISO 8601 in UTC; empty for all.
    """

    tail: int | None = None
    since: str = ""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, sources: Sequence[Source]) -> Iterator[Printed]:
        """Yield what is there, life after life, the lines of its ranks by time."""
        for one in sources:
            self._offsets[one.path] = self._begin(one)
        lives = groupby(sources, key=lambda one: one.life)
        lines = chain.from_iterable(self._merged(list(ranks)) for _, ranks in lives)
        return iter(deque(lines, self.tail)) if self.tail is not None else lines

    def read_on(self, sources: Sequence[Source]) -> list[Printed]:
        """Return what came since, at most a megabyte of each; of new sources from their start."""
        found = [one for source in sources for one in self._lines(source, _FOLLOWED_BYTES)]
        return sorted(found, key=lambda one: (one.source.life, one.line.at))

    def _merged(self, ranks: Sequence[Source]) -> Iterator[Printed]:
        return heapq.merge(*map(self._lines, ranks), key=lambda one: one.line.at)

    def _begin(self, source: Source) -> int:
        with _opened(source) as file:
            offset = 0 if self.tail is None else offset_of_last(file, self.tail)
            return max(offset, offset_since(file, self.since)) if self.since else offset

    def _lines(self, source: Source, bytes_max: int | None = None) -> Iterator[Printed]:
        start = offset = self._offsets.get(source.path, 0)
        with _opened(source) as file:
            # A file that grows as fast as it is read would have no end.
            size_bytes = file.seek(0, 2)
            end = size_bytes if bytes_max is None else start + bytes_max
            file.seek(offset)
            while offset < end:
                raw = file.readline(LINE_BYTES_MAX)
                if not raw.endswith(b"\n") and len(raw) < LINE_BYTES_MAX:
                    return  # it is being written
                offset += len(raw)
                self._offsets[source.path] = offset
                yield Printed(source, parse_line(raw))


def find_sources(folder: Path) -> list[Source]:
    """Return the logs of ranks, by life and rank; nothing if the folder holds none.

    Args:
        folder: the folder of the logs, or the output folder of the run, which has them in
            ``logs``.

    Raises:
        StoreDenied: a log leads out of the folder, or is no plain file.
    """
    for place in (folder, folder / "logs"):
        files = [one for one in place.glob("*/rank-*.log") if _NAME.fullmatch(one.name)]
        if files:
            return _numbered(folder, files)
    return []


def _opened(source: Source) -> BinaryIO:
    return open_inside(source.root, source.path)


def offset_of_last(file: BinaryIO, lines: int) -> int:
    """Return the offset at which the last lines of a file begin."""
    end = file.seek(0, 2)
    left = lines + 1  # the last line's own end is one
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start)
        found = block.count(b"\n")
        if found >= left:
            for _ in range(left):
                block = block[: block.rindex(b"\n")]
            return start + len(block) + 1
        left, end = left - found, start
    return 0


def offset_since(file: BinaryIO, since: str) -> int:
    """Return the offset of the first line that is not older than ``since``."""
    low, high = 0, file.seek(0, 2)
    while high - low > _BLOCK_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline(_BLOCK_BYTES)
        if _at(file.readline(LINE_BYTES_MAX)) < since:
            low = middle
        else:
            high = middle
    file.seek(low)
    if low:
        low += len(file.readline(_BLOCK_BYTES))
    while (raw := file.readline(LINE_BYTES_MAX)) and _at(raw) < since:
        low += len(raw)
    return low


def _at(raw: bytes) -> str:
    return parse_line(raw).at


def _numbered(root: Path, files: Sequence[Path]) -> list[Source]:
    begun: dict[str, str] = {}
    for one in files:
        with open_inside(root, one) as file:
            at = _at(file.readline(LINE_BYTES_MAX))
        name = one.parent.name
        begun[name] = min(at, begun.get(name, at))
    lives = {name: nth for nth, name in enumerate(sorted(begun, key=lambda one: (begun[one], one)))}
    found = [
        Source(lives[one.parent.name] + 1, one.parent.name, int(one.stem[5:]), one, root)
        for one in files
    ]
    return sorted(found, key=lambda one: (one.life, one.rank))
