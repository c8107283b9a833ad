"""JSON grammar of non-tensor state.

A long list of objects in a document for people, as the text that it is there (pure).

What a run logged grows with its steps, and nobody needs it to go on. Where the document shows such
a list begins and ends at the edge of its lines, so it is cut out and put back without being
decoded: what that takes does not grow with the number of objects, only with their bytes.

The grammar of plain values (docs/format.md), held against without making a value of them.

Who reads a tree later makes lists, dicts and arrays of it; here it is only walked, in bounds.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import IntegrityError
from resilient.format.document import check_depth, nested
from resilient.format.keys import STATE_DOCUMENT
from resilient.format.safetensors_file import read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.format.manifest import PartEntry

INDENT = 2
"""Of a document for people, in spaces per level."""

_EDGE = " " * INDENT
_BETWEEN = ",\n"


@dataclass(frozen=True, slots=True)
class JsonRows:
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

    def plus(self, more: Iterable[str]) -> JsonRows:
        """Return these and then others, each as :func:`row_of` spells it."""
        return JsonRows(_BETWEEN.join([self.text, *more] if self.text else more))


def row_of(tree: Any) -> str:
    """Return an object's JSON tree as its lines in a document.

    Raises:
        ValueError: a number in it is not finite; a tree says that otherwise.
    """
    text = json.dumps(tree, sort_keys=True, indent=INDENT, allow_nan=False)
    return 2 * _EDGE + text.replace("\n", "\n" + 2 * _EDGE)


def extract_rows(document: str, field: str) -> tuple[str, JsonRows]:
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
        return document, JsonRows()
    return document[:start] + document[end + len(closes) - 1 :], JsonRows(document[start + 1 : end])


def insert_rows(document: str, field: str, rows: JsonRows) -> str:
    """Return a document with rows where it has an empty list for ``field``."""
    if not rows.text:
        return document
    opens = f'\n{_EDGE}"{field}": ['
    return document.replace(f"{opens}]", f"{opens}\n{rows.text}\n{_EDGE}]", 1)


DEPTH_MAX = 200
_LISTS = frozenset({"$tuple", "$set", "$frozenset", "$size"})
_PAIRS = frozenset({"$dict", "$odict", "$counter"})
_ARRAYS = frozenset({"$numpy", "$array"})
_TEXTS = frozenset({"$bytes", "$dtype", "$device"})
_FLOATS = frozenset({"nan", "inf", "-inf"})
_COMPLEX_LENGTH = 2
# A dtype of NumPy that has plain bytes; `S`, `U`, `V` and `O` could ask for any memory.
_NUMPY = re.compile(r"[<>|=](?:[biuf](?:1|2|4|8)|f16|c8|c16)")


def tree_of(part: PartEntry, data: bytes, rows: str = "") -> Any:
    """Return a part's tree from the content of its document.

    Args:
        part: what the manifest says of it.
        data: the document's.
        rows: a field of the tree to leave as :class:`Rows`, where its text allows it.

    Raises:
        IntegrityError: the document is no JSON, or does not hold the part.
    """
    try:
        return _tree_around(rows, data) if rows and _is_its_own(part) else _tree_of(part, data)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        problem = f"no `{part.name}` in it" if isinstance(error, KeyError) else str(error)
        raise IntegrityError(
            f"`{part.document}` cannot be read: {problem}", key=part.document
        ) from error


def _tree_of(part: PartEntry, data: bytes) -> Any:
    if part.scope == "rank":
        header, _ = read_header(data, part.document)
        return json.loads(header["__metadata__"]["state"])
    fields = json.loads(data)
    return fields[part.name] if part.document == STATE_DOCUMENT else fields


def _is_its_own(part: PartEntry) -> bool:
    return part.scope != "rank" and part.document != STATE_DOCUMENT


def _tree_around(field: str, data: bytes) -> Any:
    document, rows = extract_rows(data.decode(), field)
    tree = json.loads(document)
    return {**tree, field: rows} if rows.text else tree


def tensors_of(tree: Any) -> list[str]:
    """Return the name of every tensor in a tree, having held all of it against the grammar.

    Raises:
        IntegrityError: it does not fit the grammar, or nests too deep.
    """
    try:
        check_depth(tree, DEPTH_MAX)
        return list(_walk(tree))
    except ValueError as error:
        raise IntegrityError(f"a checkpoint's state is no tree of ours: {error}") from error


def _walk(tree: Any) -> Iterator[str]:
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += nested(one)
        elif isinstance(one, dict):
            tag = next(iter(one)) if len(one) == 1 else ""
            if not tag.startswith("$"):
                waiting += nested(one.values())
            elif tag == "$tensor":
                yield _text(tag, one[tag])
            else:
                waiting += _inside(tag, one[tag])


def _inside(tag: str, raw: Any) -> list[Any]:
    """Return what a tagged value holds that is a tree itself."""
    if tag in _LISTS:
        return list(_list(tag, raw))
    if tag in _PAIRS:
        pairs = [_list(tag, pair) for pair in _list(tag, raw)]
        _require(all(len(pair) == 2 for pair in pairs), tag)  # noqa: PLR2004 - a pair
        return [one for pair in pairs for one in pair]
    if tag in _ARRAYS:
        dtype, values = _list(tag, raw)
        _require(_NUMPY.fullmatch(_text(tag, dtype)) is not None, tag)
        _require(isinstance(values, dict) and list(values) == ["$tensor"], tag)
        return [values]
    _check_leaf(tag, raw)
    return []


def _check_leaf(tag: str, raw: Any) -> None:
    if tag in _TEXTS:
        _text(tag, raw)
    elif tag == "$float":
        _require(_text(tag, raw) in _FLOATS, tag)
    elif tag == "$complex":
        parts = [_text(tag, one) for one in _list(tag, raw)]
        _require(len(parts) == _COMPLEX_LENGTH, tag)
    else:
        raise ValueError(f"unknown tag `{tag[:40]}`")


def _list(tag: str, raw: Any) -> list[Any]:
    _require(isinstance(raw, list), tag)
    return raw  # type: ignore[no-any-return]


def _text(tag: str, raw: Any) -> str:
    _require(isinstance(raw, str), tag)
    return str(raw)


def _require(holds: bool, tag: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(f"what `{tag}` says makes no sense")
