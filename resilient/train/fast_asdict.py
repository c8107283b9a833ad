"""Faster replacement of ``dataclasses.asdict`` for dataclasses with mostly plain values.

A call of ``asdict`` at each step would take longer than all other bookkeeping of the step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from math import isfinite
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = frozenset({type(None), bool, int, float, str})


def fast_asdict(item: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named fields in this order; the values share no memory with ``item``.

    Args:
        item: Any object.
        names: At least two names.
    """
    values = dict(zip(names, _getter(names)(item), strict=True))
    if not _PLAIN.issuperset(map(type, values.values())):
        for name, value in values.items():
            if type(value) not in _PLAIN:
                values[name] = _copy(value)
    return values


class CachedAsdict:
    """Cached ``fast_asdict`` of an object, which returns the same dict if no field changed.

    The caller must not change the dict.

    Args:
        convert: Function from a value that is not plain to its copy; None copies like ``asdict``.
    """

    def __init__(self, convert: Callable[[Any], Any] | None = None) -> None:
        self._convert = convert or _copy
        self._values: tuple[Any, ...] = ()
        self._names: tuple[str, ...] = ()
        self._cached: dict[str, Any] = {}
        self._inside: list[tuple[int, str]] = []

    def of(self, item: Any, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the named fields, like ``fast_asdict``."""
        values = _getter(names)(item)
        if names is not self._names or not self._are_known(values):
            self._names, self._values = names, values
            self._cached = dict(zip(names, values, strict=True))
            nested_indices = [at for at, value in enumerate(values) if not _is_plain(value)]
            self._cached |= {names[at]: self._convert(values[at]) for at in nested_indices}
            self._inside = [(at, repr(self._cached[names[at]])) for at in nested_indices]
        return self._cached

    def _are_known(self, values: tuple[Any, ...]) -> bool:
        """Return whether all values are identical objects and unchanged inside."""
        return all(map(is_, values, self._values)) and all(
            repr(self._convert(values[at])) == text for at, text in self._inside
        )


def _is_plain(value: Any) -> bool:
    """Return whether a value needs no conversion; JSON has neither infinity nor NaN."""
    return type(value) in _PLAIN and (type(value) is not float or isfinite(value))


def _copy(value: Any) -> Any:
    """Return a value copied as by ``asdict``; empty and plain containers are copied faster."""
    kind = type(value)
    if kind is list and _PLAIN.issuperset(map(type, value)):
        return value.copy()
    if kind is dict and _PLAIN.issuperset(map(type, chain(value, value.values()))):
        return value.copy()
    return asdict(_ValueHolder(value))["value"]


@cache
def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*names)


@dataclass
class _ValueHolder:
    """Holder of one value, for ``asdict`` to copy as a field."""

    value: Any
