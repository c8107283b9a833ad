"""One line that a rank printed, as it stands in a file (pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass

OUT, ERR, RUN = "out", "err", "run"
"""Where it was printed; the last is what the launcher says of a life in between."""

TEXT_BYTES_MAX = 1 << 14
"""What is longer is kept as several lines."""

LINE_BYTES_MAX = TEXT_BYTES_MAX * 4
"""Of a whole line: bytes that are no text take three when they are kept."""

_STORED = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]{8,15}Z) (out|err|run) (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Line:
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


def parse_line(raw: bytes) -> Line:
    """Return what a line of a file says; one that is not ours is a text without a time."""
    text = raw.decode("utf-8", "replace").rstrip("\n")
    found = _STORED.fullmatch(text)
    return Line(*found.groups()) if found else Line("", OUT, text)


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
