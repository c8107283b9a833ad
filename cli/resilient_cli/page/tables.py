"""HTML tables of the page, and escaping of their text."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from resilient.redaction import escape_control_chars

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LONGEST = 200
_MOMENT = len("2026-01-01T00:00:00")
_SEARCH_ATTRIBUTES = 'placeholder="name or *.bias" autocomplete="off" spellcheck="false"'


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell of a table.

    Attributes:
        shown: HTML.
        value: Number that the column is sorted by; None to sort by text.
    """

    shown: str
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Row of a table that can be sorted, searched and opened.

    Attributes:
        cells: HTML; the first cell names the row.
        part: Value by which rows can be filtered.
        is_same: Hide the row if only differences are wanted.
        detail: HTML that is shown below the row when it is opened.
        load: Address of the detail, requested when the row is opened; empty if included.
    """

    cells: Sequence[str | Cell]
    part: str = ""
    is_same: bool = False
    detail: str = ""
    load: str = ""


def text(value: object) -> str:
    """Escape untrusted text: the result has no markup, and no characters that move other text."""
    return escape(escape_control_chars(str(value), ""))


def short(value: object, most: int = LONGEST) -> str:
    """Escape a text that is cut to ``most`` characters."""
    value_text = str(value)
    return text(value_text if len(value_text) <= most else value_text[: most - 3] + "...")


def path(name: str) -> str:
    """Return the name of a tensor, with line breaks allowed after dots and slashes."""
    html = short(name).replace(".", ".<wbr>").replace("/", "/<wbr>")
    return f'<span class="path">{html}</span>'


def at(iso: str) -> str:
    """Return a UTC time as people write it; any other text unchanged."""
    is_one = len(iso) >= _MOMENT and iso[10:11] == "T"
    moment = iso[:_MOMENT].replace("T", " ") if is_one else iso
    return f'<span class="one-line">{text(moment)}</span>'


def legend(*items: tuple[str, str]) -> str:
    """Return the legend of pairs: the class of a mark, and its meaning as HTML."""
    entries = "".join(f'<span><i class="dot {kind}"></i>{name}</span>' for kind, name in items)
    return f'<p class="legend">{entries}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """Return a table of HTML cells; the columns in ``numbers`` are aligned to the right."""
    body = "".join(f"<tr>{_cells(cells, numbers)}</tr>" for cells in rows)
    return scroll(f"<table>{_head(head, numbers)}<tbody>{body}</tbody></table>")


def searchable_table(
    name: str,
    head: Sequence[str],
    rows: Sequence[Row],
    numbers: Sequence[int],
    caption: str,
    *,
    differing: bool = False,
) -> str:
    """Return a table that can be sorted by column, searched by name, and opened row by row.

    Args:
        name: Id of the table in the page.
        head: Names of the columns.
        rows: Rows of the table.
        numbers: Columns that are aligned to the right.
        caption: Description for screen readers.
        differing: Offer to hide rows that are the same.
    """
    body = "".join(_body(f"{name}-{nth}", row, numbers, len(head)) for nth, row in enumerate(rows))
    parts = list(dict.fromkeys(row.part for row in rows if row.part))
    tools = [
        f'<label>Find <input type="search" data-find="{name}" {_SEARCH_ATTRIBUTES}></label>',
    ]
    if len(parts) > 1:
        options = "".join(f"<option>{text(part)}</option>" for part in parts)
        tools.append(
            f'<label>Part <select data-part="{name}"><option value="">all</option>{options}'
            "</select></label>"
        )
    if differing:
        tools.append(
            f'<label class="check"><input type="checkbox" data-only="{name}">'
            " only what differs</label>"
        )
    return (
        f'<div class="tools">{"".join(tools)}'
        f'<span id="{name}-count" class="count" role="status">{len(rows)} of {len(rows)}</span>'
        f"</div>"
        + scroll(
            f'<table id="{name}" data-sorted><caption>{text(caption)}</caption>'
            f"{_head(head, numbers)}{body}</table>"
        )
    )


def scroll(html: str) -> str:
    """Wrap HTML so that it scrolls sideways in a narrow window, also with the keyboard."""
    return f'<div class="scroll" tabindex="0">{html}</div>'


def _head(head: Sequence[str], numbers: Sequence[int]) -> str:
    cells = (
        f'<th scope="col"{" class=n" if nth in numbers else ""}>{title}</th>'
        for nth, title in enumerate(head)
    )
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _cells(cells: Sequence[str | Cell], numbers: Sequence[int]) -> str:
    html = []
    for nth, content in enumerate(cells):
        cell = content if isinstance(content, Cell) else Cell(content)
        value = "" if cell.value is None else f' data-value="{cell.value!r}"'
        html.append(f"<td{' class=n' if nth in numbers else ''}{value}>{cell.shown}</td>")
    return "".join(html)


def _body(name: str, row: Row, numbers: Sequence[int], columns: int) -> str:
    """Return a row and its detail, which are sorted and hidden together."""
    head_html = row.cells[0].shown if isinstance(row.cells[0], Cell) else row.cells[0]
    marks = f' data-part="{text(row.part)}"' if row.part else ""
    marks += " data-same" if row.is_same else ""
    detail_row = ""
    if row.detail or row.load:
        load = f' data-load="{escape(row.load)}"' if row.load else ""
        detail_row = (
            f'<tr class="detail" id="{name}" hidden><td colspan="{columns}"><div{load}>'
            f"{row.detail}</div></td></tr>"
        )
        head_html = (
            f'<button class="open" aria-expanded="false" aria-controls="{name}">'
            f"{head_html}</button>"
        )
    cells = _cells(row.cells[1:], [number - 1 for number in numbers])
    return f'<tbody{marks}><tr><th scope="row">{head_html}</th>{cells}</tr>{detail_row}</tbody>'
