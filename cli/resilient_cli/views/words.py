"""Words that several views share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resilient_cli.render import age_seconds, human_age

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.names import CheckpointId

NONE = "-"


def count(number: int, noun: str) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def folder(checkpoint: CheckpointId | None) -> str | None:
    """Return a checkpoint's folder, None for none, as JSON wants it."""
    return checkpoint.folder if checkpoint else None


def age(then: str, now: str) -> str:
    """Return the age of a moment for people, a dash when it cannot be read."""
    seconds = age_seconds(then, now)
    return NONE if seconds is None else human_age(seconds)


def inline(values: Mapping[str, Any]) -> str:
    """Return a mapping on one line."""
    return ", ".join(f"{name} {plain(value)}" for name, value in values.items()) or NONE


def plain(value: Any) -> str:
    """Return a JSON value for people: strings without their quotes."""
    return value if isinstance(value, str) else json.dumps(value)
