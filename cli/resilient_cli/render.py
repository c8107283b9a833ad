"""Values to a table, to plain columns or to JSON; the only module that styles.

stdout carries the answer and nothing else; whatever is said about the work goes to stderr. All text
goes through :mod:`resilient_cli.streams`, which spells what a terminal would obey.
Terminal colours are three escape codes, so nothing heavier is loaded for them.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from resilient.showing import cleared, visible, without_secrets
from resilient_cli.streams import answering, columns_of, leave_the_pipe, put

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_GAP = "  "
_LAST_MIN = 20
"""Columns that a last column must have left to be folded, and not its row to be stacked."""
_KIBI = 1024
_STYLES = {"ok": "32", "DAMAGED": "31;1", "warning": "33", "abandoned": "2", "error:": "31;1"}
_STYLES |= {"danger": "31;1", "note": "2"}


class Format(StrEnum):
    """What the answer is for: eyes, other Unix tools, or programs."""

    HUMAN = "human"
    PLAIN = "plain"
    JSON = "json"


@dataclass(slots=True)
class Output:
    """How the answer is wanted; the global options fill it in as they are met.

    Attributes:
        format: for whom.
        quiet: only ids.
        debug: tracebacks too.
        color: unless conventions forbid it.
        asks: whether a question may be asked.
        agrees: whether the answer to a question is yes without asking.
    """

    format: Format = Format.HUMAN
    quiet: bool = False
    debug: bool = False
    color: bool = True
    asks: bool = True
    agrees: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names. A cell that is a word of a state gets that state's colour."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, one pair per line."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found out, once, for every format.

    Attributes:
        command: dotted name, for example ``ckpt.ls``; part of the schema's name.
        kind: the JSON document's ``type``.
        document: the JSON document's other fields.
        blocks: the same for people, in order; texts are left out of plain columns.
        ids: what ``-q`` prints, one per line.
        is_verbatim: whether another program reads it, so that not a character may be masked;
            whoever made it refused what is secret.
    """

    command: str
    kind: str
    document: Mapping[str, Any]
    blocks: tuple[Table | Facts | str, ...]
    ids: tuple[str, ...] = field(default=())
    is_verbatim: bool = False


def show(answer: Answer, output: Output) -> None:
    """Write the answer to stdout in the wanted format, without the secrets of URLs."""
    if not answer.is_verbatim:
        answer = _cleared(answer)
    if output.quiet:
        # Each is one line, whatever others called it; a text that is the whole answer may be more.
        is_text = answer.ids == answer.blocks
        lines: Iterable[str] = answer.ids if is_text else (visible(one, "\t") for one in answer.ids)
    elif output.format is Format.JSON:
        schema = {"schema": f"resilient/{answer.command}@1", "type": answer.kind}
        lines = [_json({**schema, **answer.document})]
    elif output.format is Format.PLAIN:
        lines = _plain_lines(answer.blocks)
    else:
        width = columns_of(sys.stdout)
        lines = _human_lines(answer.blocks, colored=_colored(output, sys.stdout), width=width)
    is_as_it_is = answer.is_verbatim and not sys.stdout.isatty()
    try:
        with answering():
            for line in lines:
                _put(line, as_it_is=is_as_it_is, is_painted=_colored(output, sys.stdout))
            sys.stdout.flush()
    except BrokenPipeError:
        leave_the_pipe()


def _put(line: str, *, as_it_is: bool, is_painted: bool) -> None:
    if as_it_is:
        sys.stdout.write(line + "\n")
    else:
        put(line + "\n", sys.stdout, is_painted=is_painted)


def _json(value: Mapping[str, Any]) -> str:
    # All else that a terminal obeys JSON escapes by itself.
    return json.dumps(value).replace("\x7f", "\\u007f")


def _cleared(answer: Answer) -> Answer:
    blocks = tuple(
        replace(one, rows=_cells(one.rows))
        if isinstance(one, Table)
        else replace(one, pairs=_cells(one.pairs))
        if isinstance(one, Facts)
        else without_secrets(one)
        for one in answer.blocks
    )
    ids = tuple(map(without_secrets, answer.ids))
    return replace(answer, document=cleared(answer.document), blocks=blocks, ids=ids)


def _cells(rows: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(map(without_secrets, row)) for row in rows)


def show_error(fields: Mapping[str, Any], output: Output) -> None:
    """Write an error to stderr: two lines for people, one JSON object for programs.

    Args:
        fields: ``exit``, ``code``, ``message`` and ``hint``.
        output: the wanted format.
    """
    clean = cleared(fields)
    if output.format is Format.JSON:
        head = {"schema": "resilient/error@1", "type": "error"}
        put(_json({**head, **clean}) + "\n", sys.stderr)
        return
    word = _paint("error:", colored=_colored(output, sys.stderr))
    # More lines of a message stand farther in than a hint: none can look like one.
    message = visible(clean["message"]).replace("\n", "\n    ")
    put(f"{word} {message}  [{clean['code']}]\n", sys.stderr, is_painted=True)
    if clean["hint"]:
        put(f"  hint: {visible(clean['hint'], '')}\n", sys.stderr)


def human_size(size_bytes: int) -> str:
    """Return a size for people: ``512 B``, ``4.9 GiB``."""
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
    """Return an age for people in its largest whole unit: ``5s``, ``14m``, ``3h``, ``12d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def age_seconds(then: str, now: str) -> float | None:
    """Return the seconds between two ISO 8601 times, None when one cannot be read."""
    try:
        return (datetime.fromisoformat(now) - datetime.fromisoformat(then)).total_seconds()
    except (TypeError, ValueError):
        return None


def _plain_lines(blocks: Sequence[Table | Facts | str]) -> Iterator[str]:
    """Yield tab-separated lines, a blank one between blocks; texts are for people only."""
    shown = [block for block in blocks if not isinstance(block, str)]
    for number, block in enumerate(shown):
        if number:
            yield ""
        rows = (block.columns, *block.rows) if isinstance(block, Table) else block.pairs
        yield from ("\t".join(map(_printable, row)) for row in rows)


def _human_lines(
    blocks: Sequence[Table | Facts | str], *, colored: bool, width: int = 0
) -> Iterator[str]:
    """Yield the lines of all blocks, a blank one before each table but the first.

    Args:
        blocks: of an answer.
        colored: whether words of a state get their colours.
        width: columns of the terminal; 0 for as many as are wanted.
    """
    shown = [block for block in blocks if not isinstance(block, Table) or block.rows]
    for number, block in enumerate(shown):
        if isinstance(block, str):
            yield visible(block)
            continue
        if number and isinstance(block, Table):
            yield ""
        rows = (block.columns, *block.rows) if isinstance(block, Table) else block.pairs
        clean = [[_printable(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*clean, strict=True)]
        before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        if not width or before + widths[-1] <= width:
            yield from _aligned(clean, widths, colored=colored)
        elif before + _LAST_MIN <= width or isinstance(block, Facts):
            yield from _wrapped(clean, widths, max(width - before, 1), colored=colored)
        else:
            yield from _stacked(clean, width, colored=colored)


def _aligned(
    rows: Sequence[Sequence[str]], widths: Sequence[int], *, colored: bool
) -> Iterator[str]:
    """Yield rows with every column but the last padded to its widest cell."""
    for row in rows:
        padded = (
            _paint(cell, colored=colored) + " " * (width - len(cell))
            for cell, width in zip(row, widths, strict=True)
        )
        yield _GAP.join(padded).rstrip()


def _wrapped(
    rows: Sequence[Sequence[str]], widths: Sequence[int], room: int, *, colored: bool
) -> Iterator[str]:
    """Yield rows whose last column goes on below itself; what can be copied is never cut."""
    for *head, last in rows:
        first, *more = _folded(last, room)
        yield from _aligned([[*head, first]], [*widths[:-1], 0], colored=colored)
        indent = " " * (sum(widths[:-1]) + len(_GAP) * (len(widths) - 1))
        yield from (indent + line for line in more)


def _stacked(rows: Sequence[Sequence[str]], width: int, *, colored: bool) -> Iterator[str]:
    """Yield each row as a list of its own: a terminal that is too narrow for the columns."""
    names, *values = rows
    widest = max(map(len, names))
    for number, row in enumerate(values):
        if number:
            yield ""
        pairs = [pair for pair in zip(names, row, strict=True) if pair[1]]
        room = max(width - widest - len(_GAP), 1)
        yield from _wrapped(pairs, [widest, 0], room, colored=colored)


def _folded(text: str, room: int) -> list[str]:
    wrapped = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return wrapped or [""]


def _printable(cell: str) -> str:
    """Return a cell that cannot move the cursor; names come from files that others wrote."""
    return visible(cell, "")


def _paint(word: str, *, colored: bool) -> str:
    style = _STYLES.get(word)
    return f"\x1b[{style}m{word}\x1b[0m" if colored and style else word


def _colored(output: Output, stream: TextIO) -> bool:
    """Say whether colours are welcome; the conventions of no-color.org and clig.dev."""
    if not output.color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
