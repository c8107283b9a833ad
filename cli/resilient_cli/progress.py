"""How far something is that takes more than a second: a bar on a terminal, else a line at times."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Self

from resilient.clock import SystemClock
from resilient_cli.render import human_age, human_size
from resilient_cli.streams import columns_of, put, redraw

if TYPE_CHECKING:
    from typing import TextIO

    from resilient.clock import Clock

SILENT_SECONDS = 1.0
_BAR_SECONDS, _TICK_SECONDS, _LINE_SECONDS = 0.1, 1.0, 10.0
_WIDTH = 20


class _Line:
    """A line on stderr: taken back on a terminal, one after the other elsewhere.

    Args:
        what: what is done, one word.
        clock: what time it is.
        stream: where to; stderr.
    """

    def __init__(self, what: str, clock: Clock | None = None, stream: TextIO | None = None) -> None:
        self._what, self._clock = what, clock or SystemClock()
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = ""

    def _show(self, line: str) -> None:
        if self._is_terminal:
            redraw(line.ljust(len(self._shown)), self._stream)
            self._shown = line
        else:
            put(f"{line}\n", self._stream)
            self._stream.flush()

    def _clear(self) -> None:
        """Take the line away; it is no part of the answer."""
        if self._shown and self._is_terminal:
            redraw(" " * len(self._shown), self._stream)
            redraw("", self._stream)


class Progress(_Line):
    """Says how many bytes are done; nothing in the first second.

    Args:
        what: what is done, one word.
        clock: what time it is.
        stream: where to; stderr.
    """

    def __init__(self, what: str, clock: Clock | None = None, stream: TextIO | None = None) -> None:
        super().__init__(what, clock, stream)
        self._next = self._clock.monotonic_seconds() + SILENT_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar away."""
        self._clear()

    def __call__(self, done: int, of: int) -> None:
        """Take note that ``done`` of ``of`` bytes are done."""
        now = self._clock.monotonic_seconds()
        if now < self._next:
            return
        share = done / of if of else 1.0
        sizes = f"{human_size(done)} of {human_size(of)}"
        if self._is_terminal:
            filled = "#" * round(_WIDTH * share)
            line = f"{self._what} [{filled:<{_WIDTH}}] {sizes}"
            columns = columns_of(self._stream)
            # A line that goes on below itself cannot be taken back.
            is_short = len(line) < columns or not columns
            self._show(line if is_short else f"{self._what} {100 * share:.0f} %")
        else:
            self._show(f"{self._what} {100 * share:.0f} %, {sizes}")
        self._next = now + (_BAR_SECONDS if self._is_terminal else _LINE_SECONDS)


class Waiting(_Line):
    """Says for how long something goes on whose end nobody knows; nothing in the first second.

    Args:
        what: what is done, one word.
        clock: what time it is.
        stream: where to; stderr.
    """

    def __init__(self, what: str, clock: Clock | None = None, stream: TextIO | None = None) -> None:
        super().__init__(what, clock, stream)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="waiting", daemon=True)

    def __enter__(self) -> Self:
        """Begin to tell, from a thread of its own."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Tell no more, whatever the end is."""
        self._is_over.set()
        self._thread.join()
        self._clear()

    def _tell(self) -> None:
        began = self._clock.monotonic_seconds()
        wait_seconds = SILENT_SECONDS
        while not self._is_over.wait(wait_seconds):
            self._show(f"{self._what} for {human_age(self._clock.monotonic_seconds() - began)}")
            wait_seconds = _TICK_SECONDS if self._is_terminal else _LINE_SECONDS
