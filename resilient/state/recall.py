"""Know a part's tensors again: the same memory as when it was captured last, named the same.

A held step is captured at each step, and mostly nothing is new but the numbers. What a part is
made of is asked of it each time, or seen at a glance (:mod:`~resilient.state.glances`); every key,
the kind of every container and the place of every tensor among them are compared with the last
time, and so is each tensor: its storage, offset, shape, strides and dtype. Only if all of that is
the same are the tensors the same *object*, :class:`Kept`, and what was derived from them holds.
Whatever else is there is taken apart anew, so nothing depends on what is remembered here but the
time that it takes.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from resilient.state.asking import state_of
from resilient.state.glances import glance_at
from resilient.state.tree import PLAIN, PLAIN_VALUES, flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from resilient.state.drafts import Draft
    from resilient.state.glances import Glance
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
        self._looks: dict[str, _Look] = {}
        self._restless: set[str] = set()
        self._strange: set[str] = set()

    def take_apart(self, part: str, stateful: Any) -> tuple[Any, Tensors]:
        """Return the state of a stateful as a tree, and the tensors in it.

        Crash: nothing was stored.

        Raises:
            UnsavableState: as ``flatten`` does.
        """
        same = self._at_a_glance(part, stateful)
        if same is not None:
            return same
        said = state_of(stateful)
        tree, tensors = self.flatten(part, said)
        glance = glance_at(stateful, said, tensors) if part not in self._restless else None
        if glance is not None and (glance.is_by_value or isinstance(tensors, Kept)):
            self._remember(part, stateful, glance, tree, tensors)
        return tree, tensors

    def _remember(
        self, part: str, stateful: Any, glance: Glance, tree: Any, tensors: Tensors
    ) -> None:
        rest = glance.rest()
        if rest is not None and flatten(part, rest)[1]:
            # What is asked each time shall not be among what is kept.
            return
        kept = tensors if isinstance(tensors, Kept) else Kept(tensors)
        constant = Constant(tree if rest is None else tree["state"])
        self._looks[part] = _Look(stateful, glance, constant, kept)

    def _at_a_glance(self, part: str, stateful: Any) -> tuple[Any, Tensors] | None:
        """Return what ``take_apart`` does if nothing is new but numbers; None if more may be."""
        look = self._looks.get(part)
        if look is None or look.stateful is not stateful:
            return None
        if not look.glance.is_same() or not self._is_still_there(part, look):
            del self._looks[part]
            if not look.has_proved:
                # To look costs time, too.
                self._restless.add(part)
            return None
        look.has_proved = True
        rest = look.glance.rest()
        if rest is None:
            return look.constant, look.tensors
        tree, more = flatten(part, rest)
        return None if more else ({"state": look.constant, **tree}, look.tensors)

    def _is_still_there(self, part: str, look: _Look) -> bool:
        known = self._known.get(part)
        if look.glance.is_by_value:
            return True
        return known is not None and known.tensors is look.tensors and known.is_still_there()

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
        known.live = walk.seen
        self._known[part] = known
        return tree, known.tensors


@dataclass(slots=True)
class _Look:
    """What a part was when it was asked last.

    Attributes:
        stateful: what was asked.
        glance: sees whether it would say the same.
        constant: what it said, but for ``glance.rest``.
        tensors: what that names.
        has_proved: whether it has been the same since.
    """

    stateful: Any
    glance: Glance
    constant: Constant
    tensors: Kept
    has_proved: bool = False


class _Known:
    """One part as it was taken apart.

    Args:
        walk: through it.
        tree: what it became.
        tensors: the same ones.

    Attributes:
        tensors: by name.
        live: the objects that training has of them, as the last walk saw them.
        constants: what stands in the tree for each group of tensors that the walk saw.
    """

    live: Sequence[torch.Tensor]

    def __init__(self, walk: _Walk, tree: Any, tensors: Kept) -> None:
        self.tensors = tensors
        self.constants = tuple(map(Constant, _constants(tree)))
        self._places = walk.places
        self._seen = [tensors[name] for one in self.constants for name in _names(one)]
        self._dtypes = [*map(_dtype, self._seen)]

    def is_like(self, walk: _Walk) -> bool:
        """Say whether the walk saw the same memory in the same places, under the same eyes."""
        return walk.places == self._places and self._is_memory_of(walk.seen)

    def is_still_there(self) -> bool:
        """Say whether the very tensors that the last walk saw are still the same memory."""
        return self._is_memory_of(self.live)

    def _is_memory_of(self, live: Sequence[torch.Tensor]) -> bool:
        if [*map(_dtype, live)] != self._dtypes:
            return False
        try:
            # The same storage, offset, shape and strides, and neither conjugated nor negated.
            is_same = all(map(torch.Tensor.is_set_to, live, self._seen))
            # What counts changes of the one must count those of the other.
            return is_same and [*map(_changes, live)] == [*map(_changes, self._seen)]
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
        if kind in PLAIN_VALUES or (kind is float and math.isfinite(value)):
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
