"""The URL of a store: its protocol, and how it may be shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_USERINFO = re.compile(r"://[^\s/@]*@")
_QUERY = re.compile(r"\?[^\s\"'<>]+=[^\s\"'<>]*")


def protocol_of(url: str) -> str:
    """Return ``s3`` for ``s3://bucket/run``, ``file`` for ``file:`` and a plain path."""
    scheme, separator, _ = url.partition("://")
    if separator:
        return scheme.lower()
    return "file"


def redacted(url: str) -> str:
    """Return ``url`` without user, password, query and fragment, fit for a log or an error."""
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{protocol_of(url)}://<unreadable>"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def redacted_text(text: str) -> str:
    """Return another library's message without what a URL in it would give away."""
    return _QUERY.sub("?<redacted>", _USERINFO.sub("://", text))
