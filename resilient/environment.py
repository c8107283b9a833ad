"""Readers of environment variables.

An empty variable counts as unset. A value that is not accepted is an error, because a user would
not notice an ignored setting.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
_SHOWN_MAX = 80


def read_flag(environ: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """Return the boolean of a variable.

    Args:
        environ: Environment.
        name: Name of the variable.
        default: Value of an unset or empty variable.

    Raises:
        ConfigError: The value is none of the accepted words. Case and surrounding blanks are
            ignored.
    """
    word = environ.get(name, "").strip().lower()
    if not word:
        return default
    if word not in (*TRUE, *FALSE):
        raise refuse(environ, name, f"expected one of {', '.join((*TRUE, *FALSE))}")
    return word in TRUE


def read_choice(environ: Mapping[str, str], name: str, choices: Sequence[str], default: str) -> str:
    """Return the word of a variable, in lower case.

    Args:
        environ: Environment.
        name: Name of the variable.
        choices: Accepted words.
        default: Value of an unset or empty variable.

    Raises:
        ConfigError: The value is none of the choices.
    """
    word = environ.get(name, "").strip().lower()
    if word and word not in choices:
        raise refuse(environ, name, f"expected one of {', '.join(choices)}")
    return word or default


def read_integer(
    environ: Mapping[str, str], name: str, default: int, *, least: int | None = None
) -> int:
    """Return the whole number of a variable.

    Args:
        environ: Environment.
        name: Name of the variable.
        default: Value of an unset or empty variable.
        least: Smallest accepted number.

    Raises:
        ConfigError: The value is not a whole number, or is too small.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise refuse(environ, name, f"expected a whole number{bound}")
    return number


def read_seconds(environ: Mapping[str, str], name: str) -> float:
    """Return the seconds of a variable; 0 for an unset or empty variable.

    Raises:
        ConfigError: The value is not a finite number of at least 0.
    """
    text = environ.get(name, "").strip()
    if not text:
        return 0.0
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise refuse(environ, name, "expected a number of seconds of at least 0")
    return number


def refuse(environ: Mapping[str, str], name: str, expected: str) -> ConfigError:
    """Return the error for the value of a variable.

    Args:
        environ: Environment.
        name: Name of a variable without secrets, because the error shows its value.
        expected: Accepted values.
    """
    return ConfigError(
        f"environment variable {name}={environ[name][:_SHOWN_MAX]!r} is not accepted: {expected}",
        hint=f"unset {name}",
    )
