"""What is whole of a JSON document that breaks off (pure)."""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = re.compile(r'\s*,?\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_COMMA = re.compile(r"\s*,?\s*")
_DECODER = json.JSONDecoder()


def cut_document(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object that are whole before it breaks off (pure).

    Of a list that is cut its whole elements are taken.
    """
    found: dict[str, Any] = {}
    at = text.find("{") + 1
    while at and (match := _KEY.match(text, at)):
        value, end = _value(text, match.end())
        key = _text_of(match[1])
        if end == match.end() or key is None:
            break
        found[key] = value
        if end < 0 or end == len(text):
            break
        at = end
    return found


def _text_of(quoted: str) -> str | None:
    try:
        found = json.loads(quoted)
    except ValueError:
        return None
    return found if isinstance(found, str) else None


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins somewhere and where it ends; -1: it breaks off."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return _elements(text, at)
    # A number at the very end may have had more digits.
    return (value, end) if end < len(text) else (None, at)


def _elements(text: str, at: int) -> tuple[Any, int]:
    if not text.startswith("[", at):
        return None, at
    found, place = [], at + 1
    while match := _COMMA.match(text, place):
        try:
            value, place = _DECODER.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            break
        if place == len(text):
            break
        found.append(value)
    return found, -1
