"""The JSON Schema of arguments: for editors, and for whoever generates a file of them (pure)."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from resilient.train.arguments.choices import CHOICES
from resilient.train.arguments.kinds import NONE, kinds_of

if TYPE_CHECKING:
    from dataclasses import Field

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
    """Return the JSON Schema (draft 2020-12) of a file from which a dataclass is made.

    It says types, choices, defaults and help; what two arguments say together is only known
    when the object is made. Secrets have no default there.
    """
    kinds = kinds_of(cls)
    taken = [one for one in fields(cls) if one.init]
    return {
        "$schema": DIALECT,
        "title": cls.__name__,
        "type": "object",
        "properties": {one.name: _property(one, kinds.get(one.name, ())) for one in taken},
        "required": [one.name for one in taken if _has_no_default(one)],
        "additionalProperties": False,
    }


def _property(one: Field[Any], kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Return what one field takes.

    Where a text may also hold several names (``debug``), choices are examples and no limit.
    """
    said: dict[str, Any] = {"description": str(one.metadata.get("help", ""))}
    types = list(dict.fromkeys(_TYPES[kind] for kind in kinds))
    if types:
        said["type"] = types[0] if len(types) == 1 else types
    choices: list[str | None] = [*CHOICES.get(one.name, ())]
    if choices and types == ["array"]:
        said["items"] = {"enum": choices}
    elif choices and set(types) <= {"string", "null"}:
        said["enum"] = [*choices, None] if "null" in types else choices
    elif choices:
        said["examples"] = choices
    if one.default is not MISSING and not one.metadata.get("is_secret"):
        said["default"] = one.default
    return said


def _has_no_default(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING
