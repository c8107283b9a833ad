"""How ``--help`` is set: no line is wider than the terminal, and no word is cut.

Typer wants fifty columns at least and breaks words at hyphens, so that an option in an example
cannot be copied. Where there is no room for two columns, what an option does stands below it.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_COLUMNS_MAX = 80
_MARGIN = 2
_TWO_COLUMNS_MIN = 60
_TERM_MAX = 30
_GAP = 2
_BELOW = 4

# The base of what makes a help; it changed its home between releases of Typer.
_CONTEXT: Any = TyperGroup.context_class
_FORMATTER: Any = _CONTEXT.formatter_class


class HelpFormatter(_FORMATTER):  # type: ignore[misc]  # it is one of two
    """Sets a help for the terminal at hand."""

    def __init__(self, *_: Any, **__: Any) -> None:
        columns = min(shutil.get_terminal_size().columns, _COLUMNS_MAX)
        super().__init__(width=max(columns - _MARGIN, 1))

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write how the command is called."""
        first = f"{'Usage: ' if prefix is None else prefix}{prog} "
        fits = len(first) + 20 <= self.width
        indent = " " * (len(first) if fits else _BELOW)
        lines = _folded(args, self.width, indent)
        if fits and lines:
            lines[0] = first + lines[0].lstrip()
        else:
            lines = [*_folded(first.strip(), self.width, "", _BELOW), *lines]
        self._write_lines(lines)

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        self._write_lines(_paragraphs(text, self.width, " " * self.current_indent))

    def write_dl(
        self, rows: Sequence[tuple[str, str]], col_max: int = _TERM_MAX, col_spacing: int = _GAP
    ) -> None:
        """Write terms and what they mean: beside them, or below where it is narrow."""
        rows = list(rows)
        first = min(max((len(term) for term, _ in rows), default=0), col_max) + col_spacing
        is_narrow = self.width < _TWO_COLUMNS_MIN
        start = self.current_indent + (_BELOW if is_narrow else first)
        for term, meaning in rows:
            own = _folded(term, self.width if is_narrow else 0, " " * self.current_indent, _BELOW)
            lines = list(_paragraphs(meaning, self.width, " " * start))
            is_beside = not is_narrow and len(term) <= first - col_spacing
            if is_beside and lines:
                lines[0] = own[0].ljust(start) + lines[0].lstrip()
                own = []
            self._write_lines([*own, *lines])

    def _write_lines(self, lines: Sequence[str] | Iterator[str]) -> None:
        self.write("".join(f"{line}\n" for line in lines))


class HelpContext(_CONTEXT):  # type: ignore[misc]  # it is one of two
    """Knows how a help is set."""

    formatter_class = HelpFormatter


class _Wrapper(textwrap.TextWrapper):
    """Folds between words, and behind the strokes of a choice."""

    wordsep_simple_re = re.compile(r"([\t\n ]+|(?<=\|))")


def _paragraphs(text: str, width: int, indent: str) -> Iterator[str]:
    for number, paragraph in enumerate(one for one in text.split("\n\n") if one.strip()):
        if number:
            yield ""
        yield from _folded(" ".join(paragraph.split("\n")), width, indent)


def _folded(text: str, width: int, indent: str, more: int = 0) -> list[str]:
    """Return a text as lines of a width; 0: as one."""
    if not width:
        return [indent + text]
    wrapper = _Wrapper(
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * more,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text)
