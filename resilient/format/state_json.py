"""Checks of the JSON form of non-tensor state, without conversion into Python objects.

docs/format.md has the grammar of this JSON. Another module later builds tuples, sets and arrays
from the parsed JSON (the tree). This module only walks the tree, within bounds.

The log of a run is a long list of JSON objects, which grows with the steps of the run. A resume
does not need the log, so this module keeps the list as text. Indentation marks the start and the
end of the list in the document. The module can therefore cut the list out and put it back without
parsing the objects. The cost depends on the number of bytes, not on the number of objects.
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
"""Indentation of a document for people, in spaces per level."""

_EDGE = " " * INDENT
_BETWEEN = ",\n"


@dataclass(frozen=True, slots=True)
class JsonRows:
    """A sequence of objects as text, spelled as in a document.

    Attributes:
        text: Lines between the brackets' lines; empty for no objects.
    """

    text: str = ""

    def trees(self) -> list[Any]:
        """Parse the objects as JSON trees.

        Raises:
            ValueError: The text is not JSON.
            RecursionError: The objects nest deeper than any state.
        """
        trees: list[Any] = json.loads(f"[{self.text}]")
        return trees

    def newest(self) -> Iterator[Any]:
        """Yield the objects' trees from the last to the first, each decoded on demand.

        Raises:
            ValueError: An object is not JSON.
            RecursionError: An object nests deeper than any state.
        """
        end = len(self.text)
        while end > 0:
            # A line with this many spaces and a brace begins an object of this list, and nothing
            # else.
            begin = max(self.text.rfind(f"\n{2 * _EDGE}{{", 0, end), 0)
            yield json.loads(self.text[begin:end].rstrip(_BETWEEN))
            end = begin

    def plus(self, more: Iterable[str]) -> JsonRows:
        """Return these rows followed by ``more``, each spelled by :func:`row_of`."""
        return JsonRows(_BETWEEN.join([self.text, *more] if self.text else more))


def row_of(tree: Any) -> str:
    """Return an object's JSON tree as its lines in a document.

    Raises:
        ValueError: A number is not finite, which a tree encodes in another way.
    """
    text = json.dumps(tree, sort_keys=True, indent=INDENT, allow_nan=False)
    return 2 * _EDGE + text.replace("\n", "\n" + 2 * _EDGE)


def extract_rows(document: str, field: str) -> tuple[str, JsonRows]:
    """Return a document with an empty list for ``field``, and the rows that were cut out.

    A line of JSON with exactly one level of indentation belongs to a field of the outer object,
    because no JSON text spans lines. A document without such a list, or with another spelling, is
    returned unchanged, without rows.
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
    """Put rows into a document that has an empty list for ``field``."""
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
# NumPy dtypes with plain bytes; `S`, `U`, `V` and `O` could request any amount of memory.
_NUMPY = re.compile(r"[<>|=](?:[biuf](?:1|2|4|8)|f16|c8|c16)")


def tree_of(part: PartEntry, data: bytes, rows: str = "") -> Any:
    """Return a part's tree from the content of its document.

    Args:
        part: Entry of the part in the manifest.
        data: Content of the document.
        rows: Field of the tree to keep as :class:`JsonRows`, if its text allows it.

    Raises:
        IntegrityError: The document is not JSON, or does not contain the part.
    """
    try:
        return (
            _tree_around(rows, data) if rows and _has_own_document(part) else _tree_of(part, data)
        )
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


def _has_own_document(part: PartEntry) -> bool:
    return part.scope != "rank" and part.document != STATE_DOCUMENT


def _tree_around(field: str, data: bytes) -> Any:
    document, rows = extract_rows(data.decode(), field)
    tree = json.loads(document)
    return {**tree, field: rows} if rows.text else tree


def tensors_of(tree: Any) -> list[str]:
    """Check a whole tree against the grammar and return the name of every tensor in it.

    Raises:
        IntegrityError: The tree does not fit the grammar, or nests too deep.
    """
    try:
        check_depth(tree, DEPTH_MAX)
        return list(_walk(tree))
    except ValueError as error:
        raise IntegrityError(f"the state of the checkpoint is not a valid tree: {error}") from error


def _walk(tree: Any) -> Iterator[str]:
    pending_nodes = [tree]
    while pending_nodes:
        node = pending_nodes.pop()
        if isinstance(node, list):
            pending_nodes += nested(node)
        elif isinstance(node, dict):
            tag = next(iter(node)) if len(node) == 1 else ""
            if not tag.startswith("$"):
                pending_nodes += nested(node.values())
            elif tag == "$tensor":
                yield _text(tag, node[tag])
            else:
                pending_nodes += _nested_trees(tag, node[tag])


def _nested_trees(tag: str, raw: Any) -> list[Any]:
    """Return the content of a tagged value that is a tree itself."""
    if tag in _LISTS:
        return list(_list(tag, raw))
    if tag in _PAIRS:
        pairs = [_list(tag, pair) for pair in _list(tag, raw)]
        _require(all(len(pair) == 2 for pair in pairs), tag)  # noqa: PLR2004 - a pair
        return [value for pair in pairs for value in pair]
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
        parts = [_text(tag, text) for text in _list(tag, raw)]
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
        raise ValueError(f"the content of `{tag}` is invalid")
