"""Redaction of secrets, escaping of control characters, and shell quoting."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

# A secret of S3 may hold a slash, which ends the user part of a URL. A port is no secret, and a
# bucket has no port. One of two slashes is lost where a URL was parsed as a path.
_USERINFO = re.compile(
    r"(?P<any>://)[^\s/@]*@"
    r"|(?P<bucket>\b(?:s3a?|gs):/{1,2})[^\s/@:]*:[^\s@]*@"
    r"|(?P<host>:/{1,2})[^\s/@:]*:(?!\d+(?:/|$))[^\s@]*@"
)
_QUERY_OF_URL = re.compile(
    r"(?P<url>:/{1,2}[^\s?#\"'`<>]*)(?:(?P<mark>\?)|(?P<anchor>#)(?=[^\s\"'`<>]*=))[^\s\"'`<>]+"
)

_WORD = re.compile(r"(?!~)[\w@%+=:,./~-]+")
"""A word that no shell splits or interprets."""


def redact_userinfo(text: str, instead: str = "***@") -> str:
    """Replace users and secrets in front of a URL's host."""
    return _USERINFO.sub(lambda match: match[match.lastgroup or 0] + instead, text)


def redact_secrets(text: str) -> str:
    """Remove users, queries and fragments from everything in a text that looks like a URL.

    A URL that was parsed as a path, ``s3:/bucket/run``, counts as a URL.
    """
    if ":/" not in text:
        return text
    return _QUERY_OF_URL.sub(r"\g<url>\g<mark>\g<anchor>***", redact_userinfo(text))


def escape_control_chars(text: str, keeps: str = "\n\t") -> str:
    """Escape the characters of a text that a terminal would obey instead of show.

    Names come from files and servers of other people. An escape, a bell, a carriage return or a
    character that reverses text direction could hide or falsify a message.

    Args:
        text: Text from any source.
        keeps: Characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keeps
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shell_quote(word: object) -> str:
    """Quote one word for a shell command line: a path, a URL, a name or a reference.

    A word that begins with a dash gets the prefix ``./``, so that no command takes it for an
    option.
    """
    text = str(word)
    text = f"./{text}" if text.startswith("-") else text
    return text if _WORD.fullmatch(text) else shlex.quote(text)


def redact_json(value: Any) -> Any:
    """Apply :func:`redact_secrets` to every text in a JSON value."""
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, Mapping):
        return {name: redact_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_json(item) for item in value]
    return value
