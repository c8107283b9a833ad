"""Spell trees as the JSON that checkpoints hold, and what is known already not again."""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from resilient.errors import UnsavableState
from resilient.format.rows import INDENT, Rows, put_rows
from resilient.state.recall import Constant

# A part of all parts, the state of an optimizer, and a parameter's.
_CONSTANT_DEPTH = 3
_EDGE = " " * INDENT
_INTS = frozenset({int})
# What two of are spelled alike if they are equal.
_EXACT = frozenset({type(None), bool, int, str})
_WORDS = {None: "null", True: "true", False: "false"}


DIGITS_MAX = 4300
"""Python reads no longer integer from JSON, unless its limit was raised."""
_INT_END = 10**DIGITS_MAX


def text_of(tree: Any) -> str:
    """Return a tree as JSON.

    Raises:
        UnsavableState: An integer has more digits than can be read.
    """
    try:
        return _text(tree, _CONSTANT_DEPTH)
    except ValueError as error:
        require_readable_numbers(tree)
        raise UnsavableState(f"the state is no JSON: {error}") from error


def require_readable_numbers(tree: Any, path: str = "") -> None:
    """Raise if an integer in a tree has more digits than can be read.

    Raises:
        UnsavableState: Names the path of the integer.
    """
    if type(tree) is int and abs(tree) >= _INT_END:
        raise UnsavableState(
            f"`{path}` is an integer of more than {DIGITS_MAX} digits, which cannot be read again",
            path=path,
            hint="give it as bytes or text in state_dict()",
        )
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, one in pairs:
            is_tag = isinstance(key, str) and key.startswith("$")
            require_readable_numbers(one, path if is_tag else f"{path}/{key}".removeprefix("/"))


def document_of(tree: Any) -> str:
    """Return a tree as a document for people.

    Raises:
        UnsavableState: An integer has more digits than can be read.
    """
    try:
        return _document_of(tree)
    except ValueError as error:
        require_readable_numbers(tree)
        raise UnsavableState(f"the state is no JSON: {error}") from error


def _document_of(tree: Any) -> str:
    if type(tree) is not dict or not tree:
        return _dumped(tree) + "\n"
    kept = {name: one for name, one in tree.items() if isinstance(one, Rows)}
    # As json.dumps puts it together, which is slow where it indents.
    lines = [f"{_EDGE}{_quoted(key)}: {_shown(tree[key])}" for key in sorted(tree)]
    text = "{\n" + ",\n".join(lines) + "\n}"
    for name, rows in kept.items():
        text = put_rows(text, name, rows)
    return text + "\n"


def is_spelled_alike(one: Any, other: Any) -> bool:
    """Say whether two trees are the same JSON, in the same order."""
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if kind is list:
        if _INTS.issuperset(map(type, one)) and _INTS.issuperset(map(type, other)):
            return bool(one == other)
        return len(one) == len(other) and all(map(is_spelled_alike, one, other))
    if kind is dict:
        return [*one] == [*other] and all(map(is_spelled_alike, one.values(), other.values()))
    # A float's zeros are equal, too.
    return repr(one) == repr(other) if kind is float else kind in _EXACT and bool(one == other)


def _text(tree: Any, depth: int) -> str:
    if isinstance(tree, Constant):
        return tree.text
    if not _has_constants(tree, depth):
        return json.dumps(tree, allow_nan=False, default=_spelled)
    # As json.dumps puts it together.
    inner = [
        f"{_quoted(key)}: {one.text if type(one) is Constant else _text(one, depth - 1)}"
        for key, one in tree.items()
    ]
    return "{" + ", ".join(inner) + "}"


def _has_constants(tree: Any, depth: int) -> bool:
    """Say whether there is something among the first levels of a tree whose text is known."""
    if not depth or type(tree) is not dict:
        return isinstance(tree, Constant)
    return any(_has_constants(one, depth - 1) for one in tree.values())


def _shown(value: Any) -> str:
    """Return the value of a field as a document has it."""
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int:
        return repr(value)
    if value is None or kind is bool:
        return _WORDS[value]
    if isinstance(value, Rows):
        return "[]"
    # No text in JSON spans lines.
    return _dumped(value).replace("\n", "\n" + _EDGE)


def _dumped(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True, indent=INDENT, allow_nan=False, default=_spelled)


def _spelled(rows: Rows) -> list[Any]:
    return rows.trees()
