"""What a command line names inside a checkpoint: ``REF:PATH`` (pure)."""

from __future__ import annotations

import re

_MOMENT = r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)?)?"
_REFERENCE = (
    rf"latest(?:~\d+)?|step:\d+|best:[^:/]+(?::(?:min|max))?|@\{{\d+\}}|@{_MOMENT}"
    r"|(?!(?:step|best):)[^:/@][^:/]*"
)
_PLACE = r"(?:[A-Za-z][A-Za-z0-9+.-]*://[^/]*/)?(?:[^:]*/)?"
_ALONE = re.compile(rf"{_PLACE}(?:{_REFERENCE})")
_INSIDE = re.compile(rf"(?P<place>{_PLACE})(?P<reference>{_REFERENCE}):(?!//)(?P<path>.+)")


def split_inside(text: str) -> tuple[str, str, bool] | None:
    """Return the checkpoint and what in it is named, of ``REF:PATH``; None of anything else.

    References have colons themselves (``step:10``, ``best:loss:max``, ``@2026-11-20T10:00``), and
    so have URLs; the first one behind a whole reference or a whole path is the one that parts.

    Args:
        text: an argument.

    Returns:
        The reference or path, the name in it, and whether it is a path or a URL: a reference
        needs a repository besides.
    """
    found = None if _ALONE.fullmatch(text) else _INSIDE.fullmatch(text)
    if found is None:
        return None
    return found["place"] + found["reference"], found["path"], bool(found["place"])
