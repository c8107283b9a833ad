"""Lengths of time and shares, as options spell them."""

from __future__ import annotations

import re
from contextvars import ContextVar

from resilient.clock import parse_length
from resilient.errors import ConfigError, UsageError

WITHIN_SECONDS: ContextVar[float] = ContextVar("WITHIN_SECONDS", default=60.0)
"""How long storage may be asked again until it answers: the global option --timeout."""

_SHARE = re.compile(r"(\d+(?:\.\d+)?) ?%|(\d+)/(\d+)")


def parse_duration(text: str, option: str) -> float:
    """Return the seconds that an option's text says.

    Raises:
        UsageError: it is no length.
    """
    seconds = parse_length(text)
    if not seconds:
        raise UsageError(f"{option} {text!r} is no length of time, as 10m is")
    return seconds


def parse_grace(text: str, option: str) -> float:
    """Return the seconds that an option's text says, where 0 means none.

    Raises:
        UsageError: it is no length.
    """
    return 0.0 if text.strip() == "0" else parse_duration(text, option)


def parse_percentage(text: str, option: str) -> float:
    """Return the share that ``5%`` or ``1/20`` says: more than 0, 1 at most.

    Raises:
        UsageError: it is no share.
    """
    found = _SHARE.fullmatch(text.strip())
    share = 0.0
    if found and found[1]:
        share = float(found[1]) / 100
    elif found and int(found[3]):
        share = int(found[2]) / int(found[3])
    if not 0 < share <= 1:
        raise UsageError(f"{option} {text!r} is no share, as 5% and 1/20 are")
    return share


def number_of(text: str, option: str) -> int | None:
    """Return the number that ``text`` says, None for ``unlimited``.

    Raises:
        ConfigError: it is neither.
    """
    word = text.strip().lower()
    if word == "unlimited":
        return None
    if not word.isdecimal():
        raise ConfigError(f"{option} {text!r} is neither a number nor unlimited")
    return int(word)
