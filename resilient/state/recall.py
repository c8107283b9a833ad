"""Know a part's tensors again: the same memory as when it was captured last, named the same.

A held step is captured at each step, and mostly nothing is new but the numbers. What a part is
made of is asked of it each time; then every key, the kind of every container and the place of
every tensor among them are compared with the last time, and so is each tensor: its storage, offset,
shape, strides and dtype. Only if all of that is the same are the tensors the same *object*,
:class:`Kept`, and what was derived from them holds. Whatever else is there is taken apart anew, so
nothing depends on what is remembered here but the time that it takes.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from resilient.state.tree import PLAIN, PLAIN_VALUES, flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.state.drafts import Draft
    from resilient.state.tree import Tensors
    from resilient.world.world import World

_TENSORS = frozenset(PLAIN)
_WORDS = frozenset({str})
_dtype, _changes = attrgetter("dtype"), attrgetter("_version")


class Kept(dict[str, torch.Tensor]):
    """Tensors of a part by name; they share memory with training, and keep it alive.

    Attributes:
        drafts: the files that they become, by who writes them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.drafts: dict[World, list[Draft]] = {}


class Constant(dict[str, Any]):
    """What stands in a tree for tensors that are known again; nobody changes it."""

    @cached_property
    def text(self) -> str:
        """Itself as JSON."""
        return json.dumps(self)


class Recall:
    """What parts were made of when they were captured last. It keeps their memory alive."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._strange: set[str] = set()

    def flatten(self, part: str, value: Any) -> tuple[Any, Tensors]:
        """Return what :func:`~resilient.state.tree.flatten` does.

        The tensors are the same object as the last time if they are the same memory.

        Crash: nothing was stored.

        Raises:
            UnsavableState: as ``flatten`` does.
        """
        if part in self._strange:
            return flatten(part, value)
        known = self._known.pop(part, None)
        walk = _Walk(known.constants if known else ())
        try:
            tree = walk.visit(value)
        except (_Unlike, RecursionError):
            self._strange.add(part)
            return flatten(part, value)
        if known is None or not known.is_like(walk):
            tree, tensors = flatten(part, value)
            if not tensors:
                self._strange.add(part)
                return tree, tensors
            known = _Known(walk, tree, Kept(tensors))
        self._known[part] = known
        return tree, known.tensors


class _Known:
    """One part as it was taken apart.

    Args:
        walk: through it.
        tree: what it became.
        tensors: the same ones.

    Attributes:
        tensors: by name.
        constants: what stands in the tree for each group of tensors that the walk saw.
    """

    def __init__(self, walk: _Walk, tree: Any, tensors: Kept) -> None:
        self.tensors = tensors
        self.constants = tuple(map(Constant, _constants(tree)))
        self._places = walk.places
        self._seen = [tensors[name] for one in self.constants for name in _names(one)]
        self._dtypes = [*map(_dtype, self._seen)]

    def is_like(self, walk: _Walk) -> bool:
        """Say whether the walk saw the same memory in the same places, under the same eyes."""
        if walk.places != self._places or [*map(_dtype, walk.seen)] != self._dtypes:
            return False
        try:
            # The same storage, offset, shape and strides, and neither conjugated nor negated.
            is_same = all(map(torch.Tensor.is_set_to, walk.seen, self._seen))
            # What counts changes of the one must count those of the other.
            return is_same and [*map(_changes, walk.seen)] == [*map(_changes, self._seen)]
        except RuntimeError:
            # One has no storage, or counts no changes.
            return False


class _Unlike(Exception):
    """The value has something that is not looked for again."""


class _Walk:
    """Goes through a value as ``flatten`` does, but for the names of tensors.

    Args:
        constants: what stands for each tensor, or dict of nothing but tensors, in the tree, in
            order, as far as that is known.

    Attributes:
        seen: the tensors, in order.
        places: where they are: the kind and the keys of each container, and the key in it of
            whatever is not plain.
    """

    def __init__(self, constants: Iterable[Any]) -> None:
        self.seen: list[torch.Tensor] = []
        self.places: list[Any] = []
        self._constants = iter(constants)

    def visit(self, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_VALUES or (kind is float and math.isfinite(value)):
            return value
        if kind in _TENSORS:
            self.seen.append(value)
            return next(self._constants, None)
        if kind is dict or kind is OrderedDict:
            return self._mapping(kind, value)
        if kind is list or kind is tuple:
            self.places.append((kind, len(value)))
            made = [self._child(index, one) for index, one in enumerate(value)]
            return made if kind is list else {"$tuple": made}
        raise _Unlike

    def _mapping(self, kind: type, value: Mapping[Any, Any]) -> Any:
        self.places.append((kind, *value))
        if not _WORDS.issuperset(map(type, value)) or "$" in "".join(value):
            # A key may be taken for a tag.
            raise _Unlike
        if _TENSORS.issuperset(map(type, value.values())):
            self.seen += value.values()
            self.places.append(_TENSORS)
            return next(self._constants, None)
        if kind is OrderedDict:
            return {"$odict": [[key, self._child(key, one)] for key, one in value.items()]}
        return {key: self._child(key, one) for key, one in value.items()}

    def _child(self, key: Any, value: Any) -> Any:
        kind = type(value)
        if kind in PLAIN_VALUES:
            return value
        self.places.append(key)
        return self.visit(value)


def _constants(tree: Any) -> Iterator[Any]:
    """Yield what does not change of a tree as long as the tensors are the same, as a walk does."""
    if isinstance(tree, dict):
        if "$tensor" in tree or ("$tuple" not in tree and _is_all_tensors(_values(tree))):
            yield tree
            return
        tree = _values(tree)
    elif not isinstance(tree, list):
        return
    for one in tree:
        yield from _constants(one)


def _names(constant: Any) -> list[str]:
    """Return the names of the tensors in what ``_constants`` yields."""
    if "$tensor" in constant:
        return [constant["$tensor"]]
    return [one["$tensor"] for one in _values(constant)]


def _values(tree: dict[str, Any]) -> Sequence[Any]:
    """Return what a tree has in place of the values of a dict."""
    return [one for _, one in tree["$odict"]] if "$odict" in tree else [*tree.values()]


def _is_all_tensors(trees: Sequence[Any]) -> bool:
    return all(isinstance(one, dict) and "$tensor" in one for one in trees)
