"""Conversion of argument values to JSON values."""

from __future__ import annotations

import datetime as dt
import math
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, cast
from uuid import UUID

_PLAIN = frozenset({type(None), bool, int, float, str})
_SPELLINGS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (os.PathLike, os.fsdecode),
    ((dt.date, dt.time), lambda value: value.isoformat()),
    (dt.timedelta, lambda value: value.total_seconds()),
    ((Decimal, Fraction, UUID, complex), str),
)
# Classes are matched by name without an import, because arguments must be readable without torch.
_OF_TORCH = frozenset({("torch", "dtype"), ("torch", "device"), ("torch", "Size")})
_DEPTH_MAX = 50
_ELEMENTS_MAX = 10_000


def json_value(value: Any, depth: int = 0) -> Any:
    """Convert a value to a JSON-able value.

    Enums become their values; paths, dtypes, ``inf`` and ``nan`` become text. Dataclasses and
    objects with ``to_dict`` become dicts; tuples and sets become lists. Functions and classes
    become names.

    Args:
        value: Any object.
        depth: Number of containers around the value.

    Raises:
        TypeError: JSON cannot represent the value.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))  # JSON has no infinity
    if type(value) in _PLAIN:
        return value
    if depth > _DEPTH_MAX:
        raise TypeError(f"more than {_DEPTH_MAX} levels of containers")
    if isinstance(value, Enum):
        return json_value(value.value, depth + 1)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return _contained(value, depth + 1)


def _contained(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {_key(name): json_value(item, depth) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [json_value(item, depth) for item in value]
    if isinstance(value, AbstractSet):
        return sorted((json_value(item, depth) for item in value), key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: json_value(getattr(value, field.name), depth) for field in fields(value)
        }
    return _spelled(value, depth)


def _spelled(value: Any, depth: int) -> Any:
    """Return the JSON value of an object that is neither plain nor a container."""
    for kind, spell in _SPELLINGS:
        if isinstance(value, kind):
            return spell(value)
    if (type(value).__module__, type(value).__name__) in _OF_TORCH:
        return str(value).removeprefix("torch.")
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        module = getattr(value, "__module__", None)
        return f"{module}.{value.__qualname__}" if module else str(value.__qualname__)
    described = _described(value)
    if described is None:
        raise TypeError(f"a value of the class `{type(value).__name__}` is not JSON")
    return json_value(described(), depth)


def _described(value: Any) -> Callable[[], Any] | None:
    """Return the method that converts an object to plain values, if there is one."""
    if callable(getattr(value, "to_dict", None)):
        return cast("Callable[[], Any]", value.to_dict)
    if callable(getattr(value, "tolist", None)) and _elements(value) <= _ELEMENTS_MAX:
        return cast("Callable[[], Any]", value.tolist)
    return None


def _elements(value: Any) -> int:
    count = getattr(value, "numel", None)
    return int(count()) if callable(count) else int(getattr(value, "size", 0))


def _key(name: Any) -> str:
    """Return a dict key in JSON's spelling."""
    plain = json_value(name)
    if plain is None or isinstance(plain, bool):
        return {None: "null", True: "true", False: "false"}[plain]
    if isinstance(plain, int | float | str):
        return str(plain)
    raise TypeError(f"a key of the class `{type(name).__name__}` is not JSON")
