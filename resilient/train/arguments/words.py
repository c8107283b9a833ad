"""Words for errors: the nearest known name, and how a value is refused (pure)."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean `x`?`` for the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def refused(name: str, value: object, accepted: str) -> ConfigError:
    """Return the error for a value; ``accepted`` says what would be."""
    return ConfigError(f"`{name}`={value!r} is not accepted: {accepted}")
