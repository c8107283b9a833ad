"""What may be shown of a text that others wrote: no secrets, and nothing that a screen obeys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

# A secret of S3 may hold a slash, which ends a user's part of a URL. A port is no secret, and a
# bucket has none. Of two slashes one is lost where a URL was taken for a path.
_USERINFO = re.compile(
    r"(?P<any>://)[^\s/@]*@"
    r"|(?P<bucket>\b(?:s3a?|gs):/{1,2})[^\s/@:]*:[^\s@]*@"
    r"|(?P<host>:/{1,2})[^\s/@:]*:(?!\d+(?:/|$))[^\s@]*@"
)
_QUERY_OF_URL = re.compile(
    r"(?P<url>:/{1,2}[^\s?#\"'`<>]*)(?:(?P<mark>\?)|(?P<anchor>#)(?=[^\s\"'`<>]*=))[^\s\"'`<>]+"
)

_WORD = re.compile(r"(?!~)[\w@%+=:,./~-]+")
"""What no shell takes for more than one word, or for anything else."""


def redact_userinfo(text: str, instead: str = "***@") -> str:
    """Return a text with something else for users and secrets in front of a URL's host."""
    return _USERINFO.sub(lambda found: found[found.lastgroup or 0] + instead, text)


def redact_secrets(text: str) -> str:
    """Return a text for people without users, queries and fragments of what looks like a URL.

    What was a URL until it was taken for a path, ``s3:/bucket/run``, looks like one.
    """
    if ":/" not in text:
        return text
    return _QUERY_OF_URL.sub(r"\g<url>\g<mark>\g<anchor>***", redact_userinfo(text))


def escape_control_chars(text: str, keeps: str = "\n\t") -> str:
    """Return a text that a terminal shows and does not obey: what is not printed is spelled.

    Names come from files and servers of others. An escape, a bell, a carriage return, or a letter
    that turns the direction of those around it could hide what is said, or say something else.

    Args:
        text: anybody's.
        keeps: what is left as it is.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keeps else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def shell_quote(word: object) -> str:
    """Return one word of a command line as a shell takes it: a path, a URL, a name, a reference.

    One that begins with a dash is a path and no option: ``./-run``.
    """
    text = str(word)
    text = f"./{text}" if text.startswith("-") else text
    return text if _WORD.fullmatch(text) else shlex.quote(text)


def redact_json(value: Any) -> Any:
    """Return a value as JSON has it, each text in it as :func:`without_secrets` returns it."""
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, Mapping):
        return {name: redact_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [redact_json(one) for one in value]
    return value
