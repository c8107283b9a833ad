"""Value types of fields: checks, parsing from text, and the arguments' JSON Schema."""

from __future__ import annotations

import inspect
import json
import types
import typing
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train.arguments.choices import CHOICES, did_you_mean, refused

if TYPE_CHECKING:
    from dataclasses import Field

NONE = type(None)
_WORDS: dict[Any, str] = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    str: "text",
    dict: "a dict",
    list: "a list of texts",
}
_TRUE = ("1", "on", "t", "true", "y", "yes")
_FALSE = ("0", "f", "false", "n", "no", "off")
_NOTHING = ("none", "null")


@cache
def kinds_of(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field of a dataclass accepts, without their parameters.

    A field gets an empty tuple, and accepts any value, if its annotation cannot be resolved at run
    time or names no plain type.
    """
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError):
        hints = _readable_hints(cls)
    return {name: _kinds(hint) for name, hint in hints.items()}


def _readable_hints(cls: type) -> dict[str, Any]:
    """Return the resolvable annotations of all bases, if one annotation cannot be resolved."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        try:
            hints |= typing.get_type_hints(base)
        except (NameError, TypeError):
            hints |= dict.fromkeys(inspect.get_annotations(base), Any)
    return hints


def _kinds(hint: Any) -> tuple[Any, ...]:
    if isinstance(hint, TextOf):
        return hint.kinds
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = [kind for part in typing.get_args(hint) for kind in _kinds(part) or (None,)]
        return () if None in parts else tuple(parts)
    plain = typing.get_origin(hint) or hint
    return (plain,) if plain is NONE or plain in _WORDS else ()


class SecretHelp(str):
    """Help text of a secret field.

    HfArgumentParser passes each metadata entry of a field to argparse, which accepts no entry of
    ours. So the help text itself is the mark.
    """

    __slots__ = ()


def is_secret(secret_field: Field[Any]) -> bool:
    """Return whether the value of a field is never shown and never saved.

    A user's own dataclass marks a field with the metadata entry ``is_secret``.
    """
    metadata = secret_field.metadata
    return isinstance(metadata.get("help"), SecretHelp) or bool(metadata.get("is_secret"))


class TextOf:
    """Type of a field with several types that also converts a command line's text.

    ``HfArgumentParser`` calls a field's type, but a union cannot be called.

    Args:
        name: Name of the type in error messages.
        kinds: Accepted types; none: any value.
    """

    def __init__(self, name: str, *kinds: Any) -> None:
        self.__name__ = name
        self.kinds = kinds

    def __call__(self, text: str) -> Any:
        """Return the value that a text means.

        Raises:
            argparse.ArgumentTypeError: The text is not a value of the types. The message does not
                show the text, because the field may be a secret.
        """
        try:
            return from_text(self.__name__, text, self.kinds)
        except ConfigError:
            import argparse

            words = _kinds_text(self.kinds)
            example = """, such as '{"key": "value"}'""" if dict in self.kinds else ""
            raise argparse.ArgumentTypeError(
                f"the value is not {words} as {self.__name__}{example}"
            ) from None


def require_kind(name: str, value: Any, kinds: tuple[Any, ...], *, is_hidden: bool = False) -> None:
    """Refuse a value of another type, before it is compared with a number.

    Raises:
        ConfigError: The type is not accepted. The message does not show a secret.
    """
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        kind_hint = f"use {_kinds_text(kinds)}, not {type(value).__name__}"
        raise (
            ConfigError(f"`{name}`: {kind_hint}") if is_hidden else refused(name, value, kind_hint)
        )


def _is_kind(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    if kind is list:
        return isinstance(value, list | tuple)
    return isinstance(value, kind)


def _kinds_text(kinds: tuple[Any, ...]) -> str:
    return " or ".join(_WORDS[kind] for kind in kinds if kind is not NONE)


def from_text(name: str, text: str, kinds: tuple[Any, ...], *, is_hidden: bool = False) -> Any:
    """Parse the text of a field, from a command line or quoted in a file.

    ``none`` is None if the field accepts None. Text that begins with ``{`` or ``[`` is JSON if
    the field accepts a dict or a list.

    Raises:
        ConfigError: The text is not a value of the field's types. The message does not show a
            secret.
    """
    if NONE in kinds and text.lower() in _NOTHING:
        return None
    for kind in (bool, int, float, dict, list):
        if kind in kinds:
            value = _READ[kind](text)
            if value is not None:
                return value
    if str in kinds or not kinds:
        return text
    hint = did_you_mean(text.lower(), ("true", "false")) if kinds[0] is bool else ""
    if is_hidden:
        raise ConfigError(f"`{name}`: use {_kinds_text(kinds)}")
    raise refused(name, text, f"use {_kinds_text(kinds)}{hint}")


def _boolean(text: str) -> bool | None:
    low = text.lower()
    return True if low in _TRUE else False if low in _FALSE else None


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    integer = _whole(text)
    if integer is not None:
        return integer
    try:
        return float(text)
    except ValueError:
        return None


def _object(text: str) -> dict[str, Any] | None:
    value = _json(text, "{")
    return value if isinstance(value, dict) else None


def _listed(text: str) -> list[Any] | None:
    value = _json(text, "[")
    return value if isinstance(value, list) else None


def _json(text: str, first: str) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith(first) else None
    except (ValueError, RecursionError):
        return None


_READ: dict[Any, Any] = {
    bool: _boolean,
    int: _whole,
    float: _number,
    dict: _object,
    list: _listed,
}

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    NONE: "null",
}


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a dataclass's argument file, for editors.

    The schema has types, choices, defaults and help. Contradictions between arguments are found
    only when the object is created. Secrets have no default in the schema.
    """
    kinds = kinds_of(cls)
    init_fields = [field for field in fields(cls) if field.init]
    return {
        "$schema": DIALECT,
        "title": cls.__name__,
        "type": "object",
        "properties": {
            argument.name: _property(argument, kinds.get(argument.name, ()))
            for argument in init_fields
        },
        "required": [argument.name for argument in init_fields if _has_no_default(argument)],
        "additionalProperties": False,
    }


def _property(argument: Field[Any], kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Return the schema of one field.

    If a text may hold several names (``debug``), its choices are examples, not a limit.
    """
    schema: dict[str, Any] = {"description": str(argument.metadata.get("help", ""))}
    types = list(dict.fromkeys(_TYPES[kind] for kind in kinds))
    if types:
        schema["type"] = types[0] if len(types) == 1 else types
    choices: list[str | None] = [*CHOICES.get(argument.name, ())]
    if choices and types == ["array"]:
        schema["items"] = {"enum": choices}
    elif choices and set(types) <= {"string", "null"}:
        schema["enum"] = [*choices, None] if "null" in types else choices
    elif choices:
        schema["examples"] = choices
    if argument.default is not MISSING and not is_secret(argument):
        schema["default"] = argument.default
    return schema


def _has_no_default(argument: Field[Any]) -> bool:
    return argument.default is MISSING and argument.default_factory is MISSING
