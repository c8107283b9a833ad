"""A long list of objects in a document for people, as the text that it is there (pure).

What a run logged grows with its steps, and nobody needs it to go on. Where the document shows such
a list begins and ends at the edge of its lines, so it is cut out and put back without being
decoded: what that takes does not grow with the number of objects, only with their bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

INDENT = 2
"""Of a document for people, in spaces per level."""

_EDGE = " " * INDENT
_BETWEEN = ",\n"


@dataclass(frozen=True, slots=True)
class Rows:
    """Objects, one after another, as a document of ours spells them.

    Attributes:
        text: what stands between the brackets' lines; empty for none.
    """

    text: str = ""

    def trees(self) -> list[Any]:
        """Return the objects as the JSON trees that they are.

        Raises:
            ValueError: they are no JSON.
            RecursionError: they nest deeper than any state.
        """
        found: list[Any] = json.loads(f"[{self.text}]")
        return found

    def newest(self) -> Iterator[Any]:
        """Yield the objects' trees from the last one back, each decoded when it is its turn.

        Raises:
            ValueError: one is no JSON.
            RecursionError: one nests deeper than any state.
        """
        end = len(self.text)
        while end > 0:
            # Lines with this many spaces and a brace begin an object of the list and no other.
            begin = max(self.text.rfind(f"\n{2 * _EDGE}{{", 0, end), 0)
            yield json.loads(self.text[begin:end].rstrip(_BETWEEN))
            end = begin

    def plus(self, more: Iterable[str]) -> Rows:
        """Return these and then others, each as :func:`row_of` spells it."""
        return Rows(_BETWEEN.join([self.text, *more] if self.text else more))


def row_of(tree: Any) -> str:
    """Return an object's JSON tree as its lines in a document.

    Raises:
        ValueError: a number in it is not finite; a tree says that otherwise.
    """
    text = json.dumps(tree, sort_keys=True, indent=INDENT, allow_nan=False)
    return 2 * _EDGE + text.replace("\n", "\n" + 2 * _EDGE)


def cut_rows(document: str, field: str) -> tuple[str, Rows]:
    """Return a document with an empty list for ``field``, and what stood there.

    A line of JSON that begins with one level of spaces and no more is about a field of the object
    itself, as no text in JSON spans lines. A document in which there is no such list, or that
    somebody spelled otherwise, is returned as it is, with no rows.
    """
    opens = f'\n{_EDGE}"{field}": ['
    closes = f"\n{_EDGE}]"
    begin = document.find(opens + "\n")
    start = begin + len(opens)
    end = document.find(closes, start)
    if begin < 0 or end < 0:
        return document, Rows()
    return document[:start] + document[end + len(closes) - 1 :], Rows(document[start + 1 : end])


def put_rows(document: str, field: str, rows: Rows) -> str:
    """Return a document with rows where it has an empty list for ``field``."""
    if not rows.text:
        return document
    opens = f'\n{_EDGE}"{field}": ['
    return document.replace(f"{opens}]", f"{opens}\n{rows.text}\n{_EDGE}]", 1)
