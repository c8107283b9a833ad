"""Store URLs: their protocol, checks, and removal of secrets before a URL is shown."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from resilient.errors import ConfigError
from resilient.redaction import redact_userinfo

_BUCKETS = frozenset({"s3", "s3a", "gs"})
_ERROR_RESPONSE = re.compile(r"(?:<\?xml[^>]*>\s*)?<Error\b.*?(?:</Error>|\Z)", re.DOTALL)
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
    """Reject a URL with a secret in the place of the bucket, which would be sent and shown.

    Raises:
        ConfigError: The host has a colon that begins no port, or the bucket has a colon.
    """
    netloc = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    _, colon, port = netloc.rpartition(":")
    is_port = port.isdecimal() and protocol_of(url) not in _BUCKETS
    if colon and protocol_of(url) != "file" and not is_port and not netloc.endswith("]"):
        raise ConfigError(
            f"cannot open {redacted(url)}: a URL must not contain a user or a secret, and this "
            "one ends inside them",
            hint="export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=...",
        )


def redacted_text(text: str) -> str:
    """Remove the secrets of URLs and server responses from another library's message.

    S3 repeats the rejected request, with the session token among the headers. From such a response
    only the code and the message are kept.
    """
    text = _ERROR_RESPONSE.sub(_code_and_message, text)
    text = _HEADER.sub(r"\1: <redacted>", text)
    return _QUERY.sub("?<redacted>", redact_userinfo(text, ""))


def fit_to_show(error: Exception) -> Exception:
    """Return another library's error without secrets, because a traceback shows causes too.

    The result is the error itself if :func:`redacted_text` would change neither its message nor the
    messages of its causes. Otherwise it is a new error with the redacted message and the same
    traceback.
    """
    if all(redacted_text(message) == message for message in _messages_of_chain(error)):
        return error
    error_text = f"{type(error).__name__}: {redacted_text(str(error))}"
    return Exception(error_text).with_traceback(error.__traceback__)


def _messages_of_chain(error: BaseException) -> list[str]:
    """Return the messages of an error and of all its causes and contexts."""
    chain: list[BaseException] = [error]
    for cause in chain:
        chain += [
            linked_error
            for linked_error in (cause.__cause__, cause.__context__)
            if linked_error and linked_error not in chain
        ]
    return [str(cause) for cause in chain]


def _code_and_message(response: re.Match[str]) -> str:
    fields = (_field(name, response[0]) for name in ("Code", "Message"))
    return ": ".join(field for field in fields if field)


def _field(name: str, response: str) -> str:
    match = re.search(f"<{name}>([^<]*)</{name}>", response)
    return match[1] if match else ""
