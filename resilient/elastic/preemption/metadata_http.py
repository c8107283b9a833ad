"""HTTP client for metadata servers: one request, no proxy, no redirect, bounded size and time."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from resilient.elastic.preemption.notice import SourceGarbled, SourceLost
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_BODY_BYTES_MAX = 1 << 16
_OK, _NO_CONTENT, _NOT_FOUND = 200, 204, 404


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """Response: status, headers in lower case, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """Body as text.

        Raises:
            SourceGarbled: The body is not text.
        """
        try:
            return self.body.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise SourceGarbled(f"it is not text: {self.body[:40]!r}") from error

    @property
    def document(self) -> dict[str, Any]:
        """JSON object in the body.

        Raises:
            SourceGarbled: The body is not a JSON object.
        """
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise SourceGarbled(f"it is not JSON: {self.text[:60]!r}") from error
        if not isinstance(value, dict):
            raise SourceGarbled(f"it is not a JSON object: {self.text[:60]!r}")
        return value

    @property
    def is_there(self) -> bool:
        """True if the address has a value.

        Raises:
            SourceLost: The server answered with an error status.
        """
        if self.status in (_NOT_FOUND, _NO_CONTENT):
            return False
        if self.status != _OK:
            raise SourceLost(f"it answered with status {self.status}")
        return True


@dataclass(frozen=True, slots=True)
class MetadataRequest:
    """Request to a metadata server.

    Attributes:
        url: Address of the request.
        method: GET, PUT or POST.
        headers: Headers to send.
        body: Body to send.
        seconds: Timeout of the connection, and then of each part of the answer.
    """

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    seconds: float = 2.0


def http_get(request: MetadataRequest) -> MetadataResponse:
    """Send a request and return the response.

    Raises:
        SourceLost: No response came in time.
    """
    parts = urlsplit(request.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # Environment proxies must not see these addresses: there they mean another host.
    connection = kind(parts.hostname or "", parts.port, timeout=request.seconds)
    path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
    try:
        connection.request(request.method, path, request.body, dict(request.headers))
        response = connection.getresponse()
        body = response.read(_BODY_BYTES_MAX + 1)
        headers = {name.lower(): value for name, value in response.getheaders()}
        status = response.status
    except TimeoutError as error:
        request_text = f"{request.method} {request.url}"
        raise SourceLost(f"{request_text} had no answer within {request.seconds:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise SourceLost(f"{request.method} {request.url} failed with {reason}") from error
    finally:
        connection.close()
    if len(body) > _BODY_BYTES_MAX:
        raise SourceLost(f"{request.method} {request.url} answered with too many bytes")
    return MetadataResponse(status, headers, body)


def check_endpoint(url: str, where: str) -> str:
    """Return a URL without its trailing slash.

    Raises:
        ConfigError: The scheme is neither http nor https, or the host or port is invalid.
    """
    parts = urlsplit(url)
    try:
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(
            f"{where}: `{url}` is not an HTTP address", hint="for example http://169.254.169.254"
        )
    return url.rstrip("/")
