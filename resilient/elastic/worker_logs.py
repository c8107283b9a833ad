"""Capture and read what ranks print.

One line that a rank printed, as it stands in a file (pure).

What the ranks of this host print, on its way to where it was going: kept in files as well.

Each rank prints into two pipes with names, opened by the first code of a worker, so that a worker
that was forked and one that was started go the same way. A thread of the agent reads them: what
comes goes on to the agent's own standard output and error, and with its time into
``FOLDER/LIFE/rank-N.log``. A worker that dies leaves its last words in the pipe, where they are
read. A disk that is full costs lines of the file, never a worker.

What ranks printed, read again: of all lives, from the end, and on as it comes.

No file is ever held in memory: the place to begin at is found from the end or by halving, and
the lines of the ranks of one life are then read side by side, in the order of their times.
"""

from __future__ import annotations

import heapq
import os
import re
import selectors
import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from resilient.events import AppendOnlyLog, write_stderr
from resilient.storage.folder import open_inside

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.clock import Clock

OUT, ERR, RUN = "out", "err", "run"
"""Where it was printed; the last is what the launcher says of a life in between."""

TEXT_BYTES_MAX = 1 << 14
"""What is longer is kept as several lines."""

LINE_BYTES_MAX = TEXT_BYTES_MAX * 4
"""Of a whole line: bytes that are no text take three when they are kept."""

_STORED = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]{8,15}Z) (out|err|run) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a rank printed.

    Attributes:
        at: when it arrived, ISO 8601 in UTC with milliseconds; empty if the file does not say.
        stream: ``out``, ``err``, or ``run`` for what the launcher says of the life.
        text: without its end, and without what a progress bar has overwritten.
    """

    at: str
    stream: str
    text: str

    def stored(self) -> str:
        """Return the line of a file."""
        return f"{self.at} {self.stream} {self.text}"


def parse_line(raw: bytes) -> LogLine:
    """Return what a line of a file says; one that is not ours is a text without a time."""
    text = raw.decode("utf-8", "replace").rstrip("\n")
    found = _STORED.fullmatch(text)
    return LogLine(*found.groups()) if found else LogLine("", OUT, text)


class Splitter:
    """Cuts bytes, as they come, into the texts of lines; never holds more than one of them."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the texts of the lines that ``data`` ends."""
        *whole, rest = (self._rest + data).split(b"\n")
        if len(rest) > TEXT_BYTES_MAX:
            # A bar that was drawn again and again has one newest state.
            rest = _shown(rest)
        while len(rest) > TEXT_BYTES_MAX:
            whole.append(rest[:TEXT_BYTES_MAX])
            rest = rest[TEXT_BYTES_MAX:]
        self._rest = rest
        return [text for one in whole for text in _texts(_shown(one))]

    def last(self) -> list[str]:
        """Return what was begun and never ended, if there is any."""
        rest, self._rest = self._rest, b""
        return _texts(_shown(rest)) if rest else []


def _shown(line: bytes) -> bytes:
    """Return what a terminal would show at the end: what stands behind the last return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _texts(line: bytes) -> list[str]:
    starts = range(0, max(1, len(line)), TEXT_BYTES_MAX)
    return [line[one : one + TEXT_BYTES_MAX].decode("utf-8", "replace") for one in starts]


VARIABLE = "RESILIENT_OUTPUT"
"""Tells a worker where its pipes are; the ends of their names follow."""

_READ_BYTES = 1 << 16
_LEFT_BYTES = 1 << 21
_TICK_SECONDS = 0.2
_END_SECONDS = 5.0


class WorkerLogCapture:
    """Keeps what the ranks of this host print, one life after the other.

    Args:
        folder: of the files; empty keeps nothing, and leaves the ranks what they inherit.
        notes: folder of the agent, for the pipes.
        clock: time.
    """

    def __init__(self, folder: str, notes: Path, clock: Clock) -> None:
        self._folder = folder
        self._notes = notes
        self._clock = clock
        self._taps: list[_Tap] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, attempt: str, cause: str, ranks: Mapping[int, int]) -> None:
        """Be ready for the ranks of a life, before they are started.

        Args:
            attempt: name of the life, the same on every host.
            cause: why it begins, as one word.
            ranks: of this host, by local rank.
        """
        self.end()
        if not self._folder:
            return
        folder = Path(self._folder, quote(attempt, safe=""))
        begun = f"begins ({cause}) on {socket.gethostname()}"
        try:
            for local_rank, rank in ranks.items():
                file = AppendOnlyLog(folder / f"rank-{rank}.log")
                file.append(LogLine(self._clock.now_iso(), RUN, begun).stored())
                for stream, onward in ((OUT, 1), (ERR, 2)):
                    pipe = _open_pipe(self._pipe(local_rank, stream))
                    self._taps.append(_Tap(pipe, onward, stream, file, self._clock))
        except OSError as error:
            write_stderr(f"what ranks print is not kept: {error.strerror}: `{error.filename}`")
            self._close()
            return
        self._ending = threading.Event()
        # A terminal that is held up must not hold up the end of the agent.
        self._thread = threading.Thread(target=_pump, args=(self._taps, self._ending), daemon=True)
        self._thread.start()

    def told(self, local_rank: int) -> dict[str, str]:
        """Return the variables that tell a worker where to print."""
        return {VARIABLE: str(self._pipe(local_rank, ""))} if self._taps else {}

    def end(self) -> None:
        """Read what the ranks of the life have left, once none of them runs any more."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        thread.join(_END_SECONDS)
        if thread.is_alive():
            self._taps = []
            return
        self._close()

    def _close(self) -> None:
        for tap in self._taps:
            os.close(tap.pipe)
        self._taps = []

    def _pipe(self, local_rank: int, stream: str) -> Path:
        return self._notes / f"prints-{local_rank}.{stream}"


class _Tap:
    """One stream of one rank."""

    def __init__(
        self, pipe: int, onward: int, stream: str, file: AppendOnlyLog, clock: Clock
    ) -> None:
        self.pipe = pipe
        self._onward = onward
        self._stream = stream
        self._file = file
        self._clock = clock
        self._splitter = Splitter()

    def take(self) -> int:
        """Hand on what is there, and return how many bytes that was."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return 0
        _write(self._onward, data)
        self._keep(self._splitter.feed(data))
        return len(data)

    def finish(self) -> None:
        """Hand on what is left; a stranger that goes on printing is not waited for."""
        left_bytes = _LEFT_BYTES
        while left_bytes > 0 and (taken := self.take()):
            left_bytes -= taken
        self._keep(self._splitter.last())

    def _keep(self, texts: list[str]) -> None:
        if texts:
            at = self._clock.now_iso()
            self._file.append("\n".join(LogLine(at, self._stream, one).stored() for one in texts))


def _pump(taps: list[_Tap], ending: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        for tap in taps:
            selector.register(tap.pipe, selectors.EVENT_READ, tap)
        while not ending.is_set():
            for key, _ in selector.select(_TICK_SECONDS):
                key.data.take()
    for tap in taps:
        tap.finish()


def _open_pipe(path: Path) -> int:
    """Return a new pipe of that name; this end both reads and writes, so it never ends."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def _write(number: int, data: bytes) -> None:
    """Write all of it, or let it be: whoever watched may be gone."""
    with suppress(OSError):
        while data:
            data = data[os.write(number, data) :]


_BLOCK_BYTES = 1 << 16
_FOLLOWED_BYTES = 1 << 20
_NAME = re.compile(r"rank-(\d{1,9})\.log")


@dataclass(frozen=True, slots=True)
class LogSource:
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
class LogRecord:
    """A line, and who printed it."""

    source: LogSource
    line: LogLine


@dataclass(slots=True)
class LogReader:
    """Reads lines of files, each from where it was left.

    Attributes:
        tail: of what is there, only so many last lines; None for all.
        since: nothing from before this time, as ISO 8601 in UTC; empty for all.
    """

    tail: int | None = None
    since: str = ""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, sources: Sequence[LogSource]) -> Iterator[LogRecord]:
        """Yield what is there, life after life, the lines of its ranks by time."""
        for one in sources:
            self._offsets[one.path] = self._begin(one)
        lives = groupby(sources, key=lambda one: one.life)
        lines = chain.from_iterable(self._merged(list(ranks)) for _, ranks in lives)
        return iter(deque(lines, self.tail)) if self.tail is not None else lines

    def read_on(self, sources: Sequence[LogSource]) -> list[LogRecord]:
        """Return what came since, at most a megabyte of each; of new sources from their start."""
        found = [one for source in sources for one in self._lines(source, _FOLLOWED_BYTES)]
        return sorted(found, key=lambda one: (one.source.life, one.line.at))

    def _merged(self, ranks: Sequence[LogSource]) -> Iterator[LogRecord]:
        return heapq.merge(*map(self._lines, ranks), key=lambda one: one.line.at)

    def _begin(self, source: LogSource) -> int:
        with _opened(source) as file:
            offset = 0 if self.tail is None else offset_of_last(file, self.tail)
            return max(offset, offset_since(file, self.since)) if self.since else offset

    def _lines(self, source: LogSource, bytes_max: int | None = None) -> Iterator[LogRecord]:
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
                yield LogRecord(source, parse_line(raw))


def find_sources(folder: Path) -> list[LogSource]:
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


def _opened(source: LogSource) -> BinaryIO:
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


def _numbered(root: Path, files: Sequence[Path]) -> list[LogSource]:
    begun: dict[str, str] = {}
    for one in files:
        with open_inside(root, one) as file:
            at = _at(file.readline(LINE_BYTES_MAX))
        name = one.parent.name
        begun[name] = min(at, begun.get(name, at))
    lives = {name: nth for nth, name in enumerate(sorted(begun, key=lambda one: (begun[one], one)))}
    found = [
        LogSource(lives[one.parent.name] + 1, one.parent.name, int(one.stem[5:]), one, root)
        for one in files
    ]
    return sorted(found, key=lambda one: (one.life, one.rank))
