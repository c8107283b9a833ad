"""The schemas of what ``--json`` writes: one file of JSON Schema for each command, and for errors.

They are data of the package: a program that reads our output can be held against them, and so are
our own tests. Nothing here loads a validator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "schemas"
_SUFFIX = ".json"


def schema_names() -> tuple[str, ...]:
    """Return the names of all schemas, sorted: ``ckpt.ls`` for ``resilient/ckpt.ls@1``."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _FOLDER.glob(f"*{_SUFFIX}")))


def schema_text(name: str) -> str:
    """Return the JSON Schema (draft 2020-12) that :func:`schema_names` names.

    Raises:
        KeyError: no schema has this name.
    """
    if name not in schema_names():
        raise KeyError(name)
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def schema_document(name: str) -> dict[str, Any]:
    """Return the same as a value."""
    document: dict[str, Any] = json.loads(schema_text(name))
    return document
