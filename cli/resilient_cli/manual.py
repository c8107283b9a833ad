"""Explanations of error codes, help topics, and the JSON schemas of ``--json``.

The message of an error describes the case at hand; the explanation of its code describes the
usual cause, what is safe and what to do next. A help topic belongs to no single command. There is
one schema for each command, and one for errors. Programs can validate our output against them,
and our tests do. All are files of the package, read on demand. This module loads no validator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from resilient_cli.output import Table

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one ``RES-`` code.

    Attributes:
        cause: Usual cause.
        safe: Data that was not changed or not lost.
        remedies: Next steps, the most likely first; commands where there are any.
    """

    cause: str
    safe: str
    remedies: tuple[str, ...]


_SAFE = "Safe: "
_SUFFIX = ".json"


@cache
def explanations() -> Mapping[str, Explanation]:
    """Return the explanation of every ``RES-`` code."""
    found = {}
    for section in _read("help_texts/errors.md").split("\n## ")[1:]:
        code, cause, safe, remedies = section.strip().split("\n\n")
        lines = tuple(line.removeprefix("- ") for line in remedies.splitlines())
        found[code] = Explanation(cause, safe.removeprefix(_SAFE), lines)
    return found


def topic_blocks(name: str) -> tuple[Table | str, ...]:
    """Return the paragraphs and tables of a help topic.

    Raises:
        FileNotFoundError: No topic has this name.
    """
    paragraphs = _read(f"help_texts/{name}.md").strip().split("\n\n")
    return tuple(_table(each) if each.startswith("|") else each for each in paragraphs)


def _table(text: str) -> Table:
    columns, _, *rows = [_cells(line) for line in text.splitlines()]
    return Table(columns, tuple(rows))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def schema_names() -> tuple[str, ...]:
    """Return the names of all schemas, sorted: ``ckpt.ls`` for ``resilient/ckpt.ls@1``."""
    names = [file.name for file in (files("resilient_cli") / "schemas").iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def schema_text(name: str) -> str:
    """Return the text of the JSON Schema (draft 2020-12) with a name of :func:`schema_names`.

    Raises:
        KeyError: No schema has this name.
    """
    if name not in schema_names():
        raise KeyError(name)
    return _read(f"schemas/{name}{_SUFFIX}")


def schema_document(name: str) -> dict[str, Any]:
    """Return the JSON Schema of this name as a value."""
    document: dict[str, Any] = json.loads(schema_text(name))
    return document


def _read(path: str) -> str:
    return (files("resilient_cli") / path).read_text(encoding="utf-8")
