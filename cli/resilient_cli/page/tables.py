"""Tables of the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """Return a table; cells are HTML already, and those of ``numbers`` stand to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        shown = (
            f"<{tag}{' class=n' if nth in numbers else ''}>{cell}</{tag}>"
            for nth, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return scroll(f"<table>{row(head, 'th')}{body}</table>")


def scroll(shown: str) -> str:
    """Return what moves sideways on its own where the window is narrow, with the keyboard too."""
    return f'<div class="scroll" tabindex="0">{shown}</div>'
