"""Signed zero-copy HTTP requests to S3, and checksums of request bodies.

Each request has a digest or checksum of its body, so that a server rejects a changed body. Every
server supports the signed SHA-256 of the body. Over https a CRC-32C suffices if the server verifies
this checksum. A CRC-32C takes client and server far less time than a SHA-256 (ADR 0055). TLS
protects the body on the network. The checksum is a signed header, and detects damage after the TLS
connection ends, for example in a proxy. Amazon's S3 documentation describes checksums in "Checking
object integrity", and unsigned bodies in "Unsigned payload". A server that verifies the checksum
repeats it in the response. Other servers ignore the checksum.

Requests are signed with AWS Signature Version 4, by the steps of "Signature Calculations for the
Authorization Header" in Amazon's S3 API reference. Bytes go between a socket and memory without a
copy. Each request has a deadline and no retries. The caller interprets the response. A connection
is reused if its last response was read to the end.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import select
import ssl
import threading
import weakref
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass
from xml.sax.saxutils import unescape

from resilient.errors import StoreError, StoreUnavailable
from resilient.storage.errors import kind_of_foreign
from resilient.storage.options import read_trusted_certificates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from socket import socket

    from resilient.clock import Clock
    from resilient.storage.options import S3Options

try:
    from crc32c import crc32c
except ImportError:  # part of the extra `fast`; without it bodies are signed
    crc32c = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Mapping

SUM_HEADER = "x-amz-checksum-crc32c"
ALGORITHM_HEADER = "x-amz-checksum-algorithm"
ALGORITHM = "CRC32C"
"""CPUs have an instruction for CRC-32C. Ceph computes CRC-32 and CRC-64 slower than SHA-256."""
# Amazon's clients send this header too. Without the header, Ceph ignores the checksum.
_SDK_ALGORITHM_HEADER = "x-amz-sdk-checksum-algorithm"
_UNSIGNED = "UNSIGNED-PAYLOAD"
_TRIALS_MAX = 3


@dataclass(frozen=True, slots=True)
class BodyChecksum:
    """Protection of a request body, which the server verifies.

    Attributes:
        digest: SHA-256 in hexadecimal digits, or the word for an unsigned body.
        headers: Further headers to sign.
    """

    digest: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def sum(self) -> str:
        """The checksum as a server repeats it; empty if there is none."""
        return self.headers.get(SUM_HEADER, "")


def signed(body: memoryview) -> BodyChecksum:
    """Return the signed SHA-256, which every server accepts."""
    return BodyChecksum(sha256(body).hexdigest())


def summed(body: memoryview) -> BodyChecksum:
    """Return the CRC-32C, for a server that verifies checksums over https."""
    value = base64.b64encode(crc32c(body).to_bytes(4)).decode("ascii")
    return BodyChecksum(_UNSIGNED, {SUM_HEADER: value, _SDK_ALGORITHM_HEADER: ALGORITHM})


class ChecksumSupport:
    """Detection of a server's support for checksums, by one request that no other request awaits.

    A test without an answer is inconclusive. A proxy may answer an unknown checksum with an error
    that looks like an outage. Therefore the next body after such a test is signed, and after three
    such tests all bodies are signed.

    Args:
        is_asked: False if only a signed SHA-256 is acceptable.
    """

    def __init__(self, *, is_asked: bool) -> None:
        self._is_known, self._is_supported = not is_asked or crc32c is None, False
        self._is_test_in_flight = self._must_sign_next = False
        self._unanswered_count = 0
        self._lock = threading.Lock()

    def begin(self) -> bool:
        """Return whether the next body has a checksum; if so, ``end`` must be called."""
        with self._lock:
            if self._is_known:
                return self._is_supported
            if self._is_test_in_flight or self._must_sign_next:
                self._must_sign_next = self._must_sign_next and self._is_test_in_flight
                return False
            self._is_test_in_flight = True
            return True

    def end(self, *, holds: bool | None) -> None:
        """Record the result of a body with a checksum.

        Args:
            holds: Whether the server repeated the checksum; None if unknown.
        """
        with self._lock:
            self._is_test_in_flight = False
            if holds is None:
                self._must_sign_next = True
                self._unanswered_count += 1
                holds = (
                    False if self._unanswered_count >= _TRIALS_MAX and not self._is_known else None
                )
            if holds is not None:
                # If one of several servers does not verify, no body gets a checksum.
                self._is_supported = holds and (self._is_supported or not self._is_known)
                self._is_known = True


_ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY = hashlib.sha256(b"").hexdigest()
"""Digest of an empty body."""
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Credentials:
    """Signing credentials and region. The repr hides secret values."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(repr=False)
    region: str


def known_credentials(options: S3Options) -> Credentials | None:
    """Return the credentials of the options or of the standard variables, else None."""
    values = (options.key, options.secret, options.token)
    if not options.key:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        values = tuple(os.environ.get(name, "") for name in names)  # type: ignore[assignment]
    key, secret, token = values
    return Credentials(key, secret, token, region_of(options)) if key and secret else None


def region_of(options: S3Options) -> str:
    """Return the region of the options or of the standard variables."""
    variables = (os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION"))
    return options.region or next(filter(None, variables), "us-east-1")


def query_of(arguments: Mapping[str, str]) -> str:
    """Return a query in its canonical signed form: sorted, all but ``-._~`` quoted."""
    pairs = sorted(
        (quote(name, safe="-._~"), quote(arguments[name], safe="-._~")) for name in arguments
    )
    return "&".join(f"{name}={value}" for name, value in pairs)


def signed_headers(
    method: str,
    url: str,
    credentials: Credentials,
    now: datetime,
    body_digest: str = EMPTY,
    more: Mapping[str, str] = NOTHING,
) -> dict[str, str]:
    """Return the signed headers of a request to ``url``.

    Args:
        method: HTTP method.
        url: URL with a quoted path and the query of ``query_of``.
        credentials: Signing credentials.
        now: Present time, UTC; servers accept a difference of 15 minutes.
        body_digest: SHA-256 of the body, in hexadecimal digits; the server rejects another body.
        more: Further headers to sign; names in lower case.
    """
    parts = urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "host": parts.netloc,
        "x-amz-content-sha256": body_digest,
        "x-amz-date": stamp,
        **more,
    }
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, parts.path or "/", parts.query, lines, names, body_digest))
    scope = f"{stamp[:8]}/{credentials.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    signature = hmac.new(
        _signing_key(credentials, stamp[:8]),
        f"{_ALGORITHM}\n{stamp}\n{scope}\n{digest}".encode(),
        hashlib.sha256,
    ).hexdigest()
    authorization = (
        f"{_ALGORITHM} Credential={credentials.key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return {**headers, "authorization": authorization}


def _signing_key(credentials: Credentials, date: str) -> bytes:
    key = f"AWS4{credentials.secret}".encode()
    for step in (date, credentials.region, "s3", "aws4_request"):
        key = hmac.new(key, step.encode(), hashlib.sha256).digest()
    return key


WIRE_ERRORS = (OSError, HTTPException)
"""Errors of a request without a whole response in time."""
PIECE_BYTES = 1 << 20
_TEXT_BYTES_MAX = 16 << 20
_OK = range(200, 300)
# Environment settings that only the library follows: they change the bucket's address or the
# content of requests.
_LIBRARY_ONLY = (
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_REQUEST_PAYER",
    "AWS_SKIP_SIGNATURE",
    "AWS_UNSIGNED_PAYLOAD",
    "AWS_S3_EXPRESS",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_KMS_KEY_ID",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
)
_EXPRESS = "--x-s3"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request.

    Attributes:
        method: HTTP method.
        key: Key in the bucket; empty for the bucket itself.
        query: Arguments of the query.
        headers: Unsigned headers.
        body: Body, sent from this memory without a copy.
        signed: Signed headers.
        is_summed: Whether a checksum protects the body, instead of a signature.
    """

    method: str
    key: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: memoryview = field(default=memoryview(b""), repr=False)
    signed: Mapping[str, str] = field(default_factory=dict)
    is_summed: bool = False


class HttpResponse:
    """A response whose body is read from the connection, within the request's deadline.

    Args:
        response: Response with its headers read.
        timer: Deadline of the request.
        proof: Protection of the request's body.
    """

    def __init__(self, response: HTTPResponse, timer: _Timer, proof: BodyChecksum) -> None:
        self.status = response.status
        self.proof = proof
        self._response, self._timer = response, timer

    @property
    def is_good(self) -> bool:
        """True if the server reports success."""
        return self.status in _OK

    def header(self, name: str) -> str:
        """Return a header, or an empty string."""
        return self._response.headers.get(name, "")

    def into(self, view: memoryview) -> int:
        """Fill the beginning of ``view`` with available bytes; return their number, 0 at the end.

        Raises:
            OSError: The connection was cut, or the deadline passed.
            HTTPException: The body ended before its length.
        """
        self._timer.limit()
        response = self._response
        if response.length is None:
            return response.readinto(view)
        if not response.length:
            return 0
        # Call the socket once, directly into a large ``view``. ``readinto`` would read again until
        # ``view`` is full, each time with the whole remaining time.
        read_bytes = response.fp.readinto1(view[: response.length])
        if not read_bytes:
            raise IncompleteRead(b"", response.length)
        response.length -= read_bytes
        return int(read_bytes)

    def text(self) -> bytes:
        """Return the body, of which at most 16 MiB are read."""
        content, view = bytearray(), memoryview(bytearray(1 << 16))
        while len(content) < _TEXT_BYTES_MAX and (read_bytes := self.into(view)):
            content += view[:read_bytes]
        return bytes(content)

    def is_read(self) -> bool:
        """Return whether the body is read to its end, so that the connection can be reused."""
        if self._response.length == 0:
            self._response.read()
        return self._response.isclosed() and not self._response.will_close


class _Timer:
    """Deadline of a request.

    Args:
        clock: Source of the time.
        seconds: Duration of the whole request.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._deadline_seconds = clock.monotonic_seconds() + seconds
        self.socket: socket | None = None

    def limit(self) -> None:
        """Limit the next call of the socket to the remaining time.

        Raises:
            TimeoutError: No time is left.
        """
        left_seconds = self._deadline_seconds - self._clock.monotonic_seconds()
        if left_seconds <= 0:
            raise TimeoutError("the request took too long")
        if self.socket:
            self.socket.settimeout(left_seconds)


class S3Connection:
    """Connections to one bucket, for any number of threads.

    Attributes:
        sums: Detection of the server's support for checksums.

    Args:
        bucket: Name of the bucket.
        options: Endpoint, trusted certificates and deadlines.
        credentials: Signing credentials.
        clock: Source of deadlines and of the signed time.
    """

    def __init__(
        self, bucket: str, options: S3Options, credentials: Credentials, clock: Clock
    ) -> None:
        self._credentials, self._clock, self._options = credentials, clock, options
        self._base = f"{endpoint_of(options, credentials.region)}/{quote(bucket)}"
        self._origin = self._base.removesuffix(urlsplit(self._base).path)
        # https without a context would not know the additional trusted certificates.
        self._trust = ssl.create_default_context() if self._base.startswith("https:") else None
        pem = read_trusted_certificates(options).decode("ascii", "ignore")
        if self._trust and pem:
            self._trust.load_verify_locations(cadata=pem)
        self.sums = ChecksumSupport(is_asked=self._trust is not None and not options.sign_bodies)
        # Digest few bodies at once, so that the first body is sent while the next are digested.
        self._digesting = threading.Semaphore(max((os.cpu_count() or 1) // 2, 1))
        self._idle: list[HTTPConnection] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        # A store has no explicit end.
        weakref.finalize(self, _close, self._idle)

    @contextmanager
    def ask(self, request: HttpRequest) -> Iterator[HttpResponse]:
        """Send a request and yield its response.

        Raises:
            OSError: The server was unreachable, cut the connection, or was too late.
            HTTPException: The received bytes are not an HTTP response.
        """
        connection = self._live_connection()
        timer = _Timer(self._clock, self._options.request_seconds)
        timer.socket = connection.sock
        is_reusable = False
        try:
            with self._digesting:
                proof = summed(request.body) if request.is_summed else signed(request.body)
            with closing(self._send(connection, request, proof, timer)) as response:
                http_response = HttpResponse(response, timer, proof)
                yield http_response
                is_reusable = http_response.is_read()
        finally:
            if is_reusable:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()

    def _send(
        self, connection: HTTPConnection, request: HttpRequest, proof: BodyChecksum, timer: _Timer
    ) -> HTTPResponse:
        url = f"{self._base}/{quote(request.key, safe='/-._~')}" if request.key else self._base
        if request.query:
            url = f"{url}?{query_of(request.query)}"
        now = datetime.fromisoformat(self._clock.now_iso())
        target = url.removeprefix(self._origin)
        connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        extra_headers = {**request.signed, **proof.headers}
        headers = signed_headers(
            request.method, url, self._credentials, now, proof.digest, extra_headers
        )
        headers |= request.headers
        if request.body or request.method in ("PUT", "POST"):
            headers["content-length"] = str(len(request.body))
        for name, value in headers.items():
            connection.putheader(name, value)
        # A server that rejects a request may respond and hang up before it has read everything.
        with suppress(BrokenPipeError, ConnectionResetError, ssl.SSLError):
            connection.endheaders()
            for at in range(0, len(request.body), PIECE_BYTES):
                timer.limit()
                connection.send(request.body[at : at + PIECE_BYTES])
        timer.limit()
        return connection.getresponse()

    def _live_connection(self) -> HTTPConnection:
        """Return a live connection: an idle connection that is still open, or a new one."""
        with self._lock:
            if self._process != os.getpid():
                # After a fork, the responses on these connections belong to the parent.
                _close(self._idle)
                self._process = os.getpid()
            while self._idle:
                idle = self._idle.pop()
                if not _is_closed_by_server(idle):
                    return idle
                idle.close()
        parts = urlsplit(self._base)
        host, within_seconds = parts.hostname or "", self._options.connect_seconds
        connection = (
            HTTPSConnection(host, parts.port, timeout=within_seconds, context=self._trust)
            if self._trust
            else HTTPConnection(host, parts.port, timeout=within_seconds)
        )
        connection.connect()
        return connection


def connect_s3(bucket: str, options: S3Options, clock: Clock) -> S3Connection | None:
    """Return our own connections, or None if only a client library supports the settings.

    A library is needed for a machine's role, unsigned requests, a proxy, a bucket of S3 Express, or
    an environment setting that changes requests.
    """
    credentials = known_credentials(options)
    if credentials is None or options.anon or bucket.endswith(_EXPRESS):
        return None
    parts = urlsplit(endpoint_of(options, credentials.region))
    is_behind_proxy = parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")
    if is_behind_proxy or any(map(os.environ.get, _LIBRARY_ONLY)):
        return None
    return S3Connection(bucket, options, credentials, clock)


def classify_timeout(error: Exception) -> type[StoreError]:
    """Classify one of ``WIRE_ERRORS``; most mean that the server did not answer."""
    error_type = kind_of_foreign(error) if isinstance(error, OSError) else StoreUnavailable
    return StoreUnavailable if error_type is StoreError else error_type


def field_of(name: str, text: str) -> str:
    """Return a field of a response, which is small and flat; empty if it is missing."""
    match = re.search(f"<{name}>([^<]*)</{name}>", text)
    return unescape(match[1], {"&quot;": '"'}) if match else ""


def endpoint_of(options: S3Options, region: str) -> str:
    """Return the endpoint for path-style requests, which every S3 server understands."""
    variables = (os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    endpoint = options.endpoint or next(filter(None, variables), "")
    parts = urlsplit(endpoint or f"https://s3.{region}.amazonaws.com")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _close(connections: list[HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _is_closed_by_server(connection: HTTPConnection) -> bool:
    """Return whether the server closed an idle connection: only a close is readable from it."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))
