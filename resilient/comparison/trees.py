"""The plain values of our own documents (docs/format.md) as values, without torch (pure)."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEPTH_MAX = 64
_LISTS = {"$tuple", "$set", "$frozenset", "$size"}
_PAIRS = {"$dict", "$odict", "$counter"}
_ARRAYS = {"$numpy", "$array"}


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that a document names."""

    name: str


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$tensor": lambda raw: Held(str(raw)),
    "$float": float,
    "$bytes": base64.b64decode,
}


def value_of(tree: Any, depth: int = 0) -> Any:
    """Return what a tree stands for; tensors as :class:`Held`, keys of dicts as texts.

    Raises:
        ValueError: it nests deeper than any state.
    """
    if depth > DEPTH_MAX:
        raise ValueError(f"values in values, more than {DEPTH_MAX} deep")
    if isinstance(tree, list):
        return [value_of(one, depth + 1) for one in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if not tag.startswith("$"):
        return {key: value_of(one, depth + 1) for key, one in tree.items()}
    return _tagged(tag, tree[tag], depth)


def _tagged(tag: str, raw: Any, depth: int) -> Any:
    if tag in _LISTS and isinstance(raw, list):
        return [value_of(one, depth + 1) for one in raw]
    if tag in _PAIRS and isinstance(raw, list):
        pairs = [one for one in raw if isinstance(one, list) and len(one) == 2]  # noqa: PLR2004
        return {str(value_of(key, depth + 1)): value_of(one, depth + 1) for key, one in pairs}
    if tag in _ARRAYS and isinstance(raw, list) and raw:
        return value_of(raw[-1], depth + 1)
    leaf = _LEAVES.get(tag)
    return leaf(raw) if leaf else raw


def plain_leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield plain values with their paths; lists of plain values count as one; no tensors."""
    if depth > DEPTH_MAX:
        return
    if isinstance(value, list | tuple) and not any(map(_is_more, value)):
        yield path, list(value)
    elif isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in pairs:
            yield from plain_leaves(one, f"{path}.{key}" if path else str(key), depth + 1)
    elif not isinstance(value, Held):
        yield path, value


def _is_more(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | Held)
