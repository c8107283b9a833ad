"""What the ranks of this host print, on its way to where it was going: kept in files as well.

Each rank prints into two pipes with names, opened by the first code of a worker, so that a worker
that was forked and one that was started go the same way. A thread of the agent reads them: what
comes goes on to the agent's own standard output and error, and with its time into
``FOLDER/LIFE/rank-N.log``. A worker that dies leaves its last words in the pipe, where they are
read. A disk that is full costs lines of the file, never a worker.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from resilient.agent.outputs.line import ERR, OUT, RUN, Line, Splitter
from resilient.lines import LineFile, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock

VARIABLE = "RESILIENT_OUTPUT"
"""Tells a worker where its pipes are; the ends of their names follow."""

_READ_BYTES = 1 << 16
_LEFT_BYTES = 1 << 21
_TICK_SECONDS = 0.2
_END_SECONDS = 5.0


class Outputs:
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
                file = LineFile(folder / f"rank-{rank}.log")
                file.append(Line(self._clock.now_iso(), RUN, begun).stored())
                for stream, onward in ((OUT, 1), (ERR, 2)):
                    pipe = _open_pipe(self._pipe(local_rank, stream))
                    self._taps.append(_Tap(pipe, onward, stream, file, self._clock))
        except OSError as error:
            say(f"what ranks print is not kept: {error.strerror}: `{error.filename}`")
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

    def __init__(self, pipe: int, onward: int, stream: str, file: LineFile, clock: Clock) -> None:
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
            self._file.append("\n".join(Line(at, self._stream, one).stored() for one in texts))


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
