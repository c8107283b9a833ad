"""How far something is that takes more than a second: a bar on a terminal, else a line at times."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from resilient.clock import SystemClock
from resilient_cli.render import columns_of, human_size

if TYPE_CHECKING:
    from types import TracebackType
    from typing import TextIO

    from resilient.clock import Clock

SILENT_SECONDS = 1.0
_BAR_SECONDS, _LINE_SECONDS = 0.1, 10.0
_WIDTH = 20


class Progress:
    """Says on stderr how many bytes are done; nothing in the first second.

    Args:
        what: what is done, one word.
        clock: what time it is.
        stream: where to; stderr.
    """

    def __init__(self, what: str, clock: Clock | None = None, stream: TextIO | None = None) -> None:
        self._what, self._clock = what, clock or SystemClock()
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next = self._clock.monotonic_seconds() + SILENT_SECONDS
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away; it is no part of the answer."""
        if self._shown and self._is_terminal:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._stream.flush()

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
            line = (
                line if len(line) < columns or not columns else f"{self._what} {100 * share:.0f} %"
            )
            self._stream.write("\r" + line.ljust(len(self._shown)))
            self._shown = line
        else:
            self._stream.write(f"{self._what} {100 * share:.0f} %, {sizes}\n")
        self._stream.flush()
        self._next = now + (_BAR_SECONDS if self._is_terminal else _LINE_SECONDS)
