"""Durations and shares in the options of commands."""

from __future__ import annotations

import re
from contextvars import ContextVar

from resilient.clock import parse_length
from resilient.errors import ConfigError, UsageError

WITHIN_SECONDS: ContextVar[float] = ContextVar("WITHIN_SECONDS", default=60.0)
"""Deadline for retries of a storage request, in seconds: the global option --timeout."""

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%|(\d+)/(\d+)")


def parse_duration(text: str, option: str) -> float:
    """Parse a duration, such as ``10m``, and return its seconds.

    Raises:
        UsageError: The text is no duration.
    """
    seconds = parse_length(text)
    if not seconds:
        raise UsageError(f"{option} {text!r} is not a duration such as 10m")
    return seconds


def parse_grace(text: str, option: str) -> float:
    """Parse a duration and return its seconds; ``0`` means none.

    Raises:
        UsageError: The text is no duration.
    """
    return 0.0 if text.strip() == "0" else parse_duration(text, option)


def parse_percentage(text: str, option: str) -> float:
    """Parse a share, such as ``5%`` or ``1/20``, and return it: more than 0, at most 1.

    Raises:
        UsageError: The text is no share.
    """
    match = _SHARE.fullmatch(text.strip())
    share = 0.0
    if match and match[1]:
        share = float(match[1]) / 100
    elif match and int(match[3]):
        share = int(match[2]) / int(match[3])
    if not 0 < share <= 1:
        raise UsageError(f"{option} {text!r} is not a share such as 5% or 1/20")
    return share


def parse_limit(text: str, option: str) -> int | None:
    """Parse a number and return it; None for ``unlimited``.

    Raises:
        ConfigError: The text is neither a number nor ``unlimited``.
    """
    word = text.strip().lower()
    if word == "unlimited":
        return None
    if not word.isdecimal():
        raise ConfigError(f"{option} {text!r} is neither a number nor unlimited")
    return int(word)
