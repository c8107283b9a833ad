"""The URL of a store: its protocol, and how it may be shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from resilient.errors import ConfigError
from resilient.redaction import redact_userinfo

_BUCKETS = frozenset({"s3", "s3a", "gs"})
_ANSWER = re.compile(r"(?:<\?xml[^>]*>\s*)?<Error\b.*?(?:</Error>|\Z)", re.DOTALL)
_HEADER = re.compile(
    r"\b(authorization|[\w-]*(?:security|session)-token)\"?\s*[:=][^\r\n]*", re.IGNORECASE
)
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
        urlsplit(url)
        parts = urlsplit(redact_userinfo(url, ""))
    except ValueError:
        return f"{protocol_of(url)}://<unreadable>"
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def require_plain_host(url: str) -> None:
    """Refuse a URL with a secret that would be taken for a bucket, and then sent and shown as one.

    Raises:
        ConfigError: there is a colon in its host that begins no port, or in its bucket.
    """
    netloc = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    _, colon, port = netloc.rpartition(":")
    is_port = port.isdecimal() and protocol_of(url) not in _BUCKETS
    if colon and protocol_of(url) != "file" and not is_port and not netloc.endswith("]"):
        raise ConfigError(
            f"cannot open {redacted(url)}: a user and a secret have no place in a URL, and this "
            "one ends in the middle of them",
            hint="export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...",
        )


def redacted_text(text: str) -> str:
    """Return another library's message without what a URL or an answer in it would give away.

    S3 repeats the request that it refuses, with the token of a session among the headers. Of such
    an answer only its code and its message are kept.
    """
    text = _ANSWER.sub(_code_and_message, text)
    text = _HEADER.sub(r"\1: <redacted>", text)
    return _QUERY.sub("?<redacted>", redact_userinfo(text, ""))


def fit_to_show(error: Exception) -> Exception:
    """Return another library's error as the cause of one of ours: a traceback shows it too.

    It is that error itself unless it, or what it came from, says what :func:`redacted_text` would
    not; then one that says the rest, from the same place.
    """
    if all(redacted_text(one) == one for one in _said_on_the_way(error)):
        return error
    said = f"{type(error).__name__}: {redacted_text(str(error))}"
    return Exception(said).with_traceback(error.__traceback__)


def _said_on_the_way(error: BaseException) -> list[str]:
    """Return what an error says, and what those say that it came from."""
    chain: list[BaseException] = [error]
    for one in chain:
        chain += [two for two in (one.__cause__, one.__context__) if two and two not in chain]
    return [str(one) for one in chain]


def _code_and_message(answer: re.Match[str]) -> str:
    fields = (_field(name, answer[0]) for name in ("Code", "Message"))
    return ": ".join(one for one in fields if one)


def _field(name: str, answer: str) -> str:
    found = re.search(f"<{name}>([^<]*)</{name}>", answer)
    return found[1] if found else ""
