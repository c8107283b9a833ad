"""Output to stdout and stderr: tables, plain columns, JSON, errors and progress.

Only the answer goes to stdout. Messages about the work go to stderr. Text goes through :func:`put`,
which escapes the control sequences of terminals. Names, messages and text from servers may contain
escape sequences, bells, carriage returns or characters that reverse the writing direction. Newlines
and the colours of this module are not escaped. Colours are a few escape codes, so no styling
library is loaded.

Progress appears after 1 s, as a bar on a terminal, and otherwise as a line every 10 s.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Self, TextIO

from resilient.clock import SystemClock
from resilient.redaction import escape_control_chars, redact_json, redact_secrets
from resilient.storage.errors import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.clock import Clock

_COLOR = re.compile(r"(\x1b\[(?:\d{1,2};?){1,2}m)")


def put(text: str, stream: TextIO, *, is_painted: bool = False) -> None:
    """Write a text to stdout or stderr, with control characters escaped.

    All output uses this function, except an answer that another program must read unchanged.

    Args:
        text: Text with its newlines.
        stream: Target stream.
        is_painted: Whether to leave the colour codes of this module unescaped.
    """
    parts = _COLOR.split(text) if is_painted else [text]
    stream.write(
        "".join(part if nth % 2 else escape_control_chars(part) for nth, part in enumerate(parts))
    )


def say(line: str) -> None:
    """Write a message about the work to stderr, without the secrets of URLs."""
    put(f"{redact_secrets(line)}\n", sys.stderr)
    sys.stderr.flush()


def redraw(line: str, stream: TextIO) -> None:
    """Overwrite the current line of a terminal."""
    stream.write("\r" + escape_control_chars(line, ""))
    stream.flush()


def clear_screen() -> None:
    """Clear the terminal; the next output starts at its top."""
    sys.stdout.write("\x1b[H\x1b[2J")


@contextmanager
def convert_write_errors() -> Iterator[None]:
    """Turn a failed write to stdout, mostly because of a full disk, into a StoreError.

    Raises:
        StoreError: The kind that matches the system's error.
        BrokenPipeError: The reader has closed the pipe.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        ignore_broken_pipe()  # the rest of the buffer would fail again at the exit
        raise kind_of(error)(
            f"the answer could not be written completely to stdout: {error.strerror}",
            hint="df -h",
        ) from error


def ignore_broken_pipe() -> None:
    """Redirect stdout to the null device after the reader has closed the pipe.

    The command continues, because its work stays valid without a reader.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def replace_closed_streams() -> None:
    """Replace a stdout or stderr that was closed at the start (``>&-``) with the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def escape_unencodable_text(*streams: TextIO) -> None:
    """Escape characters that the encoding of a stream lacks: a name must not end a command."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def columns_of(stream: TextIO) -> int:
    """Return the columns of a terminal; 0 for other streams, where lines may be long."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


_GAP = "  "
_LAST_MIN = 20
"""Smallest width to which a last column is wrapped; with less room, rows are stacked."""
_KIBI = 1024
_STYLES = {"ok": "32", "DAMAGED": "31;1", "warning": "33", "abandoned": "2", "error:": "31;1"}
_STYLES |= {"danger": "31;1", "note": "2", "UNSIGNED": "31;1"}


class Format(StrEnum):
    """Format of the answer: for people, for Unix tools, or for programs."""

    HUMAN = "human"
    PLAIN = "plain"
    JSON = "json"


@dataclass(slots=True)
class Output:
    """Output settings, which the parser fills in from the global options.

    Attributes:
        format: Format of the answer.
        quiet: Whether only ids are printed.
        debug: Whether tracebacks are printed.
        color: Whether colours are allowed; the environment and the terminal may still forbid them.
        asks: Whether the command may ask a question.
        agrees: Whether every question counts as answered with yes.
    """

    format: Format = Format.HUMAN
    quiet: bool = False
    debug: bool = False
    color: bool = True
    asks: bool = True
    agrees: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names; a cell that is a state word gets the colour of that state."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Names and values, one pair per line."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command, for every format.

    Attributes:
        command: Dotted name, for example ``ckpt.ls``; part of the schema's name.
        kind: ``type`` of the JSON document.
        document: Other fields of the JSON document.
        blocks: The same content for people, in order; plain output omits its texts.
        ids: Lines that ``-q`` prints.
        is_verbatim: Whether another program reads the answer, so that no character may be masked.
            The command has refused secrets before.
    """

    command: str
    kind: str
    document: Mapping[str, Any]
    blocks: tuple[Table | KeyValues | str, ...]
    ids: tuple[str, ...] = field(default=())
    is_verbatim: bool = False


def show(answer: CommandResult, output: Output) -> None:
    """Write the answer to stdout in the wanted format, without the secrets of URLs."""
    if not answer.is_verbatim:
        answer = _redact(answer)
    if output.quiet:
        # An id is one line, even if its name has line breaks. A text answer may have several lines.
        is_text = answer.ids == answer.blocks
        lines: Iterable[str] = (
            answer.ids
            if is_text
            else (escape_control_chars(checkpoint_id, "\t") for checkpoint_id in answer.ids)
        )
    elif output.format is Format.JSON:
        schema = {"schema": f"resilient/{answer.command}@1", "type": answer.kind}
        lines = [_json({**schema, **answer.document})]
    elif output.format is Format.PLAIN:
        lines = _plain_lines(answer.blocks)
    else:
        width = columns_of(sys.stdout)
        lines = _human_lines(answer.blocks, is_colored=_uses_color(output, sys.stdout), width=width)
    is_as_it_is = answer.is_verbatim and not sys.stdout.isatty()
    try:
        with convert_write_errors():
            for line in lines:
                _put(line, as_it_is=is_as_it_is, is_painted=_uses_color(output, sys.stdout))
            sys.stdout.flush()
    except BrokenPipeError:
        ignore_broken_pipe()


def _put(line: str, *, as_it_is: bool, is_painted: bool) -> None:
    if as_it_is:
        sys.stdout.write(line + "\n")
    else:
        put(line + "\n", sys.stdout, is_painted=is_painted)


def _json(value: Mapping[str, Any]) -> str:
    # JSON itself escapes all other control characters.
    return json.dumps(value).replace("\x7f", "\\u007f")


def _redact(answer: CommandResult) -> CommandResult:
    blocks = tuple(
        replace(block, rows=_cells(block.rows))
        if isinstance(block, Table)
        else replace(block, pairs=_cells(block.pairs))
        if isinstance(block, KeyValues)
        else redact_secrets(block)
        for block in answer.blocks
    )
    ids = tuple(map(redact_secrets, answer.ids))
    return replace(answer, document=redact_json(answer.document), blocks=blocks, ids=ids)


def _cells(rows: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(map(redact_secrets, row)) for row in rows)


def show_error(fields: Mapping[str, Any], output: Output) -> None:
    """Write an error to stderr: two lines for people, one JSON object for programs.

    Args:
        fields: ``exit``, ``code``, ``message`` and ``hint``.
        output: Output settings.
    """
    redacted_fields = redact_json(fields)
    if output.format is Format.JSON:
        head = {"schema": "resilient/error@1", "type": "error"}
        put(_json({**head, **redacted_fields}) + "\n", sys.stderr)
        return
    label = _paint("error:", is_colored=_uses_color(output, sys.stderr))
    # Further lines of a message are indented more than a hint, so that no line looks like a hint.
    message = escape_control_chars(redacted_fields["message"]).replace("\n", "\n    ")
    put(f"{label} {message}  [{redacted_fields['code']}]\n", sys.stderr, is_painted=True)
    if redacted_fields["hint"]:
        put(f"  hint: {escape_control_chars(redacted_fields['hint'], '')}\n", sys.stderr)


def human_size(size_bytes: int) -> str:
    """Format a size for people: ``512 B``, ``4.9 GiB``."""
    if size_bytes < _KIBI:
        return f"{size_bytes} B"
    size = float(size_bytes)
    units = iter(("KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = ""
    # 1023.95 would be rounded to 1024.0 of the smaller unit.
    while size >= (_KIBI - 0.05 if unit else _KIBI):
        size, unit = size / _KIBI, next(units, "EiB")
    return f"{size:.1f} {unit}"


def human_age(seconds: float) -> str:
    """Format an age for people in its largest whole unit: ``5s``, ``14m``, ``3h``, ``12d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def age_seconds(moment: str, now: str) -> float | None:
    """Return the seconds between two ISO 8601 times; None if a time cannot be parsed."""
    try:
        return (datetime.fromisoformat(now) - datetime.fromisoformat(moment)).total_seconds()
    except (TypeError, ValueError):
        return None


def _plain_lines(blocks: Sequence[Table | KeyValues | str]) -> Iterator[str]:
    """Yield tab-separated lines, with a blank line between blocks; texts are for people only."""
    tables = [block for block in blocks if not isinstance(block, str)]
    for number, block in enumerate(tables):
        if number:
            yield ""
        rows = (block.columns, *block.rows) if isinstance(block, Table) else block.pairs
        yield from ("\t".join(map(_printable, row)) for row in rows)


def _human_lines(
    blocks: Sequence[Table | KeyValues | str], *, is_colored: bool, width: int = 0
) -> Iterator[str]:
    """Yield the lines of all blocks, with a blank line before each table except at the start.

    Args:
        blocks: Blocks of an answer.
        is_colored: Whether state words get their colours.
        width: Columns of the terminal; 0 for no limit.
    """
    visible_blocks = [block for block in blocks if not isinstance(block, Table) or block.rows]
    for number, block in enumerate(visible_blocks):
        if isinstance(block, str):
            yield escape_control_chars(block)
            continue
        if number and isinstance(block, Table):
            yield ""
        rows = (block.columns, *block.rows) if isinstance(block, Table) else block.pairs
        printable_rows = [[_printable(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*printable_rows, strict=True)]
        indent_width = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        if not width or indent_width + widths[-1] <= width:
            yield from _align(printable_rows, widths, is_colored=is_colored)
        elif indent_width + _LAST_MIN <= width or isinstance(block, KeyValues):
            yield from _wrap(
                printable_rows, widths, max(width - indent_width, 1), is_colored=is_colored
            )
        else:
            yield from _stack(printable_rows, width, is_colored=is_colored)


def _align(
    rows: Sequence[Sequence[str]], widths: Sequence[int], *, is_colored: bool
) -> Iterator[str]:
    """Yield rows in which every column but the last is padded to its widest cell."""
    for row in rows:
        cells = (
            _paint(cell, is_colored=is_colored) + " " * (width - len(cell))
            for cell, width in zip(row, widths, strict=True)
        )
        yield _GAP.join(cells).rstrip()


def _wrap(
    rows: Sequence[Sequence[str]], widths: Sequence[int], width: int, *, is_colored: bool
) -> Iterator[str]:
    """Yield rows whose last column is wrapped; words are never cut, so that users can copy them."""
    for *head, last_cell in rows:
        first_line, *other_lines = _fold(last_cell, width)
        yield from _align([[*head, first_line]], [*widths[:-1], 0], is_colored=is_colored)
        indent = " " * (sum(widths[:-1]) + len(_GAP) * (len(widths) - 1))
        yield from (indent + line for line in other_lines)


def _stack(rows: Sequence[Sequence[str]], width: int, *, is_colored: bool) -> Iterator[str]:
    """Yield each row as a list of names and values, for a terminal too narrow for the columns."""
    names, *values = rows
    widest = max(map(len, names))
    for number, row in enumerate(values):
        if number:
            yield ""
        pairs = [pair for pair in zip(names, row, strict=True) if pair[1]]
        value_width = max(width - widest - len(_GAP), 1)
        yield from _wrap(pairs, [widest, 0], value_width, is_colored=is_colored)


def _fold(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _printable(cell: str) -> str:
    """Return a cell that cannot move the cursor; names come from files of other programs."""
    return escape_control_chars(cell, "")


def _paint(word: str, *, is_colored: bool) -> str:
    style = _STYLES.get(word)
    return f"\x1b[{style}m{word}\x1b[0m" if is_colored and style else word


def _uses_color(output: Output, stream: TextIO) -> bool:
    """Return whether to use colours, by the conventions of no-color.org and clig.dev."""
    if not output.color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()


SILENT_SECONDS = 1.0
_BAR_SECONDS, _TICK_SECONDS, _LINE_SECONDS = 0.1, 1.0, 10.0
_WIDTH = 20


class _Line:
    """Status line on stderr: redrawn on a terminal, printed repeatedly to other streams.

    Args:
        activity: Activity, one word.
        clock: Source of the time.
        stream: Target stream; stderr by default.
    """

    def __init__(
        self, activity: str, clock: Clock | None = None, stream: TextIO | None = None
    ) -> None:
        self._activity, self._clock = activity, clock or SystemClock()
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._line = ""

    def _show(self, line: str) -> None:
        if self._is_terminal:
            redraw(line.ljust(len(self._line)), self._stream)
            self._line = line
        else:
            put(f"{line}\n", self._stream)
            self._stream.flush()

    def _clear(self) -> None:
        """Erase the line, which is no part of the answer."""
        if self._line and self._is_terminal:
            redraw(" " * len(self._line), self._stream)
            redraw("", self._stream)


class Progress(_Line):
    """Progress in bytes; silent in the first second.

    Args:
        activity: Activity, one word.
        clock: Source of the time.
        stream: Target stream; stderr by default.
    """

    def __init__(
        self, activity: str, clock: Clock | None = None, stream: TextIO | None = None
    ) -> None:
        super().__init__(activity, clock, stream)
        self._next = self._clock.monotonic_seconds() + SILENT_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Erase the bar."""
        self._clear()

    def __call__(self, position: int, total: int) -> None:
        """Report that ``position`` of ``total`` bytes are done."""
        now_seconds = self._clock.monotonic_seconds()
        if now_seconds < self._next:
            return
        share = position / total if total else 1.0
        sizes = f"{human_size(position)} of {human_size(total)}"
        if self._is_terminal:
            bar = "#" * round(_WIDTH * share)
            line = f"{self._activity} [{bar:<{_WIDTH}}] {sizes}"
            columns = columns_of(self._stream)
            # A line that wraps cannot be redrawn.
            is_short = len(line) < columns or not columns
            self._show(line if is_short else f"{self._activity} {100 * share:.0f} %")
        else:
            self._show(f"{self._activity} {100 * share:.0f} %, {sizes}")
        self._next = now_seconds + (_BAR_SECONDS if self._is_terminal else _LINE_SECONDS)


class Waiting(_Line):
    """Elapsed time of an activity without a known end; silent in the first second.

    Args:
        activity: Activity, one word.
        clock: Source of the time.
        stream: Target stream; stderr by default.
    """

    def __init__(
        self, activity: str, clock: Clock | None = None, stream: TextIO | None = None
    ) -> None:
        super().__init__(activity, clock, stream)
        self._is_finished = threading.Event()
        self._thread = threading.Thread(
            target=self._report_elapsed_time, name="waiting", daemon=True
        )

    def __enter__(self) -> Self:
        """Start the thread that reports."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop reporting, however the block ends."""
        self._is_finished.set()
        self._thread.join()
        self._clear()

    def _report_elapsed_time(self) -> None:
        start_seconds = self._clock.monotonic_seconds()
        wait_seconds = SILENT_SECONDS
        while not self._is_finished.wait(wait_seconds):
            self._show(
                f"{self._activity} for {human_age(self._clock.monotonic_seconds() - start_seconds)}"
            )
            wait_seconds = _TICK_SECONDS if self._is_terminal else _LINE_SECONDS
