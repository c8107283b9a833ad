"""Capture of the output of ranks in log files, and reader of these files.

Each rank prints into two named pipes, which the worker opens at its start. The capture therefore
works in the same way for forked workers and for newly started workers. A thread of the agent, the
process that starts the workers, reads the pipes. The thread forwards the bytes to the agent's own
standard output and error, and writes timestamped lines to ``FOLDER/ATTEMPT/rank-N.log``. An attempt
is one start of all ranks of the run. The last output of a dead worker stays in the pipe, and the
thread still reads it. If the disk is full, the log file lacks lines, but no worker fails.

The reader of logs never loads a whole file. The reader finds the first line by a backward scan from
the end of the file, or by bisection. Then the reader merges the lines of all ranks of one attempt
by time.
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
"""Stream of a line; ``run`` marks the messages of the launcher about the attempt."""

TEXT_BYTES_MAX = 1 << 14
"""Longest text of one line; longer texts are split."""

LINE_BYTES_MAX = TEXT_BYTES_MAX * 4
"""Longest stored line: a byte that is no text takes three bytes when stored."""

_STORED = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]{8,15}Z) (out|err|run) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """Line that a rank printed.

    Attributes:
        at: Time of arrival, ISO 8601 in UTC with milliseconds; empty if the file has none.
        stream: ``out``, ``err``, or ``run`` for lines of the launcher about the attempt.
        text: Text without its line end, and without states that a progress bar overwrote.
    """

    at: str
    stream: str
    text: str

    def stored(self) -> str:
        """Return the line as stored in a file."""
        return f"{self.at} {self.stream} {self.text}"


def parse_line(raw: bytes) -> LogLine:
    """Parse a stored line; any other line becomes a text without a time."""
    text = raw.decode("utf-8", "replace").rstrip("\n")
    match = _STORED.fullmatch(text)
    return LogLine(*match.groups()) if match else LogLine("", OUT, text)


class Splitter:
    """Incremental splitter of bytes into lines; it buffers at most one line."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the texts of the lines that ``data`` completes."""
        *complete_lines, partial_line = (self._partial_line + data).split(b"\n")
        if len(partial_line) > TEXT_BYTES_MAX:
            # Keep only the newest state of a progress bar that was redrawn.
            partial_line = _final_text(partial_line)
        while len(partial_line) > TEXT_BYTES_MAX:
            complete_lines.append(partial_line[:TEXT_BYTES_MAX])
            partial_line = partial_line[TEXT_BYTES_MAX:]
        self._partial_line = partial_line
        return [text for line in complete_lines for text in _texts(_final_text(line))]

    def last(self) -> list[str]:
        """Return the incomplete last line, if there is one."""
        partial_line, self._partial_line = self._partial_line, b""
        return _texts(_final_text(partial_line)) if partial_line else []


def _final_text(line: bytes) -> bytes:
    """Return the final state of a line on a terminal: the text after the last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _texts(line: bytes) -> list[str]:
    starts = range(0, max(1, len(line)), TEXT_BYTES_MAX)
    return [line[start : start + TEXT_BYTES_MAX].decode("utf-8", "replace") for start in starts]


VARIABLE = "RESILIENT_OUTPUT"
"""Variable with the common prefix of a worker's pipes; the worker appends the stream."""

_READ_BYTES = 1 << 16
_REMAINING_BYTES_MAX = 1 << 21
_TICK_SECONDS = 0.2
_END_SECONDS = 5.0


class WorkerLogCapture:
    """Capture of the output of this host's ranks, attempt by attempt.

    Args:
        folder: Folder of the files; if empty, nothing is stored and ranks inherit the streams.
        agent_folder: Folder of the agent, for the pipes.
        clock: Clock for the timestamps.
    """

    def __init__(self, folder: str, agent_folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._agent_folder = agent_folder
        self._clock = clock
        self._forwarders: list[_StreamForwarder] = []
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, attempt: str, cause: str, ranks: Mapping[int, int]) -> None:
        """Open files and pipes for the ranks of an attempt, before they start.

        Args:
            attempt: Name of the attempt, the same on every host.
            cause: Reason for the attempt, one word.
            ranks: Global rank by local rank of this host.
        """
        self.end()
        if not self._folder:
            return
        folder = Path(self._folder, quote(attempt, safe=""))
        start_text = f"starts ({cause}) on {socket.gethostname()}"
        try:
            for local_rank, rank in ranks.items():
                file = AppendOnlyLog(folder / f"rank-{rank}.log")
                file.append(LogLine(self._clock.now_iso(), RUN, start_text).stored())
                for stream, target_fd in ((OUT, 1), (ERR, 2)):
                    pipe = _open_pipe(self._pipe(local_rank, stream))
                    self._forwarders.append(
                        _StreamForwarder(pipe, target_fd, stream, file, self._clock)
                    )
        except OSError as error:
            write_stderr(f"the output of ranks is not kept: {error.strerror}: `{error.filename}`")
            self._close()
            return
        self._ending = threading.Event()
        # A daemon thread, because a blocked terminal must not block the exit of the agent.
        self._thread = threading.Thread(
            target=_forward_output, args=(self._forwarders, self._ending), daemon=True
        )
        self._thread.start()

    def pipe_environ(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that give a worker its pipes."""
        return {VARIABLE: str(self._pipe(local_rank, ""))} if self._forwarders else {}

    def end(self) -> None:
        """Read the remaining output of the attempt, once no rank runs any more."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        thread.join(_END_SECONDS)
        if thread.is_alive():
            self._forwarders = []
            return
        self._close()

    def _close(self) -> None:
        for forwarder in self._forwarders:
            os.close(forwarder.pipe)
        self._forwarders = []

    def _pipe(self, local_rank: int, stream: str) -> Path:
        return self._agent_folder / f"prints-{local_rank}.{stream}"


class _StreamForwarder:
    """One stream of one rank."""

    def __init__(
        self, pipe: int, target_fd: int, stream: str, file: AppendOnlyLog, clock: Clock
    ) -> None:
        self.pipe = pipe
        self._target_fd = target_fd
        self._stream = stream
        self._file = file
        self._clock = clock
        self._splitter = Splitter()

    def forward(self) -> int:
        """Forward the available bytes and return their number."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return 0
        _write(self._target_fd, data)
        self._store(self._splitter.feed(data))
        return len(data)

    def finish(self) -> None:
        """Forward the remaining bytes, at most 2 MiB: a stray process may continue to print."""
        remaining_bytes = _REMAINING_BYTES_MAX
        while remaining_bytes > 0 and (taken_bytes := self.forward()):
            remaining_bytes -= taken_bytes
        self._store(self._splitter.last())

    def _store(self, texts: list[str]) -> None:
        if texts:
            at = self._clock.now_iso()
            self._file.append("\n".join(LogLine(at, self._stream, text).stored() for text in texts))


def _forward_output(forwarders: list[_StreamForwarder], ending: threading.Event) -> None:
    with selectors.DefaultSelector() as selector:
        for forwarder in forwarders:
            selector.register(forwarder.pipe, selectors.EVENT_READ, forwarder)
        while not ending.is_set():
            for key, _ in selector.select(_TICK_SECONDS):
                key.data.forward()
    for forwarder in forwarders:
        forwarder.finish()


def _open_pipe(path: Path) -> int:
    """Create a named pipe and open it for reading and writing, so that it never reports EOF."""
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def _write(number: int, data: bytes) -> None:
    """Write all bytes, and ignore errors: the reader of the output may be gone."""
    with suppress(OSError):
        while data:
            data = data[os.write(number, data) :]


_BLOCK_BYTES = 1 << 16
_FOLLOWED_BYTES = 1 << 20
_NAME = re.compile(r"rank-(\d{1,9})\.log")


@dataclass(frozen=True, slots=True)
class LogSource:
    """Log of one rank in one attempt.

    Attributes:
        life: Number of the attempt, from 1, over all agent runs.
        attempt: Folder of the attempt.
        rank: Global rank.
        path: Path of the file.
        root: Folder that the user named; the file is read only if it lies inside.
    """

    life: int
    attempt: str
    rank: int
    path: Path
    root: Path


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Line together with its log."""

    source: LogSource
    line: LogLine


@dataclass(slots=True)
class LogReader:
    """Reader of log lines that continues in each file where it stopped.

    Attributes:
        tail: Number of last lines to read; None for all.
        since: Oldest time to read, ISO 8601 in UTC; empty for all.
    """

    tail: int | None = None
    since: str = ""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, sources: Sequence[LogSource]) -> Iterator[LogRecord]:
        """Yield the existing lines, attempt by attempt, with the lines of all ranks by time."""
        for source in sources:
            self._offsets[source.path] = self._begin(source)
        attempts = groupby(sources, key=lambda source: source.life)
        lines = chain.from_iterable(self._merged(list(ranks)) for _, ranks in attempts)
        return iter(deque(lines, self.tail)) if self.tail is not None else lines

    def read_on(self, sources: Sequence[LogSource]) -> list[LogRecord]:
        """Return the new lines, at most 1 MiB per log; new logs are read from their start."""
        lines = [line for source in sources for line in self._lines(source, _FOLLOWED_BYTES)]
        return sorted(lines, key=lambda line: (line.source.life, line.line.at))

    def _merged(self, ranks: Sequence[LogSource]) -> Iterator[LogRecord]:
        return heapq.merge(*map(self._lines, ranks), key=lambda line: line.line.at)

    def _begin(self, source: LogSource) -> int:
        with _opened(source) as file:
            offset = 0 if self.tail is None else offset_of_last(file, self.tail)
            return max(offset, offset_since(file, self.since)) if self.since else offset

    def _lines(self, source: LogSource, bytes_max: int | None = None) -> Iterator[LogRecord]:
        start = offset = self._offsets.get(source.path, 0)
        with _opened(source) as file:
            # Read up to the current size: a file that grows as fast as it is read has no end.
            size_bytes = file.seek(0, 2)
            end = size_bytes if bytes_max is None else start + bytes_max
            file.seek(offset)
            while offset < end:
                raw = file.readline(LINE_BYTES_MAX)
                if not raw.endswith(b"\n") and len(raw) < LINE_BYTES_MAX:
                    return  # The writer has not finished this line.
                offset += len(raw)
                self._offsets[source.path] = offset
                yield LogRecord(source, parse_line(raw))


def find_sources(folder: Path) -> list[LogSource]:
    """Return the logs of ranks, by attempt and rank; empty if the folder has none.

    Args:
        folder: Folder of the logs, or output folder of the run with the logs in ``logs``.

    Raises:
        StoreDenied: A log points outside the folder, or is not a regular file.
    """
    for place in (folder, folder / "logs"):
        files = [path for path in place.glob("*/rank-*.log") if _NAME.fullmatch(path.name)]
        if files:
            return _numbered(folder, files)
    return []


def _opened(source: LogSource) -> BinaryIO:
    return open_inside(source.root, source.path)


def offset_of_last(file: BinaryIO, lines: int) -> int:
    """Return the offset at which the last ``lines`` lines of a file begin."""
    end = file.seek(0, 2)
    lines_left = lines + 1  # The last line's own end counts as one.
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start)
        count = block.count(b"\n")
        if count >= lines_left:
            for _ in range(lines_left):
                block = block[: block.rindex(b"\n")]
            return start + len(block) + 1
        lines_left, end = lines_left - count, start
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
    start_by_name: dict[str, str] = {}
    for entry in files:
        with open_inside(root, entry) as file:
            at = _at(file.readline(LINE_BYTES_MAX))
        name = entry.parent.name
        start_by_name[name] = min(at, start_by_name.get(name, at))
    attempts = {
        name: nth
        for nth, name in enumerate(
            sorted(start_by_name, key=lambda entry: (start_by_name[entry], entry))
        )
    }
    sources = [
        LogSource(
            attempts[entry.parent.name] + 1, entry.parent.name, int(entry.stem[5:]), entry, root
        )
        for entry in files
    ]
    return sorted(sources, key=lambda entry: (entry.life, entry.rank))
