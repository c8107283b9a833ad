"""Read-only HTTP server on the loopback interface, with a secret part in its address.

Other users of the machine do not know the address. A page of another origin in the same browser
does not know the address either, and may not read a response. A foreign host name may point to the
loopback interface (DNS rebinding). The server refuses a request with such a name in its ``Host``
header.
"""

from __future__ import annotations

import secrets
import signal
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from urllib.parse import parse_qsl

from resilient.errors import ConfigError
from resilient_cli.page.assets import served_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST = "127.0.0.1"
_TOKEN_BYTES = 32
_SILENT_SECONDS = 10
_POLL_SECONDS = 0.1
_FIELDS_MAX = 4
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_ALLOWED = {"Allow": "GET, HEAD"}


class Page(Protocol):
    """Page that is served. Several threads call its methods."""

    def version(self) -> str:
        """Return the newest version."""

    def text(self) -> str:
        """Return the page of the newest version."""

    def part(self, name: str, query: Mapping[str, str]) -> tuple[int, str] | None:
        """Return a status and a part of the page that is made on demand.

        Args:
            name: Name of the part; the result is None if there is no such part.
            query: Fields of the query.
        """


class PageServer(socketserver.ThreadingTCPServer):
    """HTTP server that opens its port when constructed, and answers in ``serve_forever``.

    Args:
        port: Port; 0 lets the system choose.
        page: Page that is served.

    Raises:
        ConfigError: The server cannot listen at the port.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, page: Page) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--port: cannot listen at {HOST}:{port}: {error}",
                hint="resilient ui RUN --port 0",
            ) from error
        self.page = page
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)

    @property
    def port(self) -> int:
        """Port that the server listens at."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Secret address of the page."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def serve_until_interrupted(self) -> NoReturn:
        """Answer until Ctrl-C. Call it in the main thread.

        Python's own handler of Ctrl-C raises at the current line of the thread. In the finalizer of
        an object, such as a request's thread, Python drops the exception, and Ctrl-C is lost.

        Raises:
            KeyboardInterrupt: Ctrl-C came, and the server no longer answers.
        """

        def end(*_: object) -> None:
            # ``shutdown`` waits for the loop of this thread, so another thread must call it.
            threading.Thread(target=self.shutdown, daemon=True).start()

        previous_handler = signal.getsignal(signal.SIGINT)
        if previous_handler is not signal.SIG_IGN:
            # A shell that starts the server in the background makes it ignore Ctrl-C.
            signal.signal(signal.SIGINT, end)
        try:
            self.serve_forever(poll_interval=_POLL_SECONDS)
        finally:
            signal.signal(signal.SIGINT, previous_handler)
        raise KeyboardInterrupt

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback: usually the client closed the connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _SILENT_SECONDS

    def version_string(self) -> str:
        return "resilient"

    def log_message(self, *_: Any) -> None:
        """Log nothing: a line would contain the secret address."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class refuses, without repeating its text."""
        del message, explain
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._send(405, "the page is read-only\n", more=_ALLOWED)
        else:
            self._send(code, "unknown request\n")

    def do_GET(self) -> None:
        reason = self._refusal_reason()
        if reason:
            self._send(403, f"{reason}\n")
            return
        path, _, query = self.path.partition("?")
        name = path.rpartition("/")[2]
        if name == "":
            self._send(200, self.server.page.text(), _HTML)
        elif name == "version":
            self._send(200, self.server.page.version(), _TEXT)
        else:
            self._send_part(name, query)

    def _send_part(self, name: str, query: str) -> None:
        try:
            fields = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
        except ValueError:
            self._send(400, "unknown request\n")
            return
        html = self.server.page.part(name, fields)
        if html is None:
            self._send(404, "unknown path\n")
        else:
            status, text = html
            self._send(status, text, _HTML if status == HTTPStatus.OK else _TEXT)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _refusal_reason(self) -> str:
        """Return the reason to refuse a request; empty if there is none."""
        names = [f"{host}:{self.server.port}" for host in (HOST, "localhost")]
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in names:
            return "this address is not served under this name"
        _, _, path = self.path.partition("?")[0].partition("/")
        token, slash, _ = path.partition("/")
        is_known = secrets.compare_digest(
            token.encode("utf-8", "replace"), self.server.token.encode()
        )
        if not self.path.startswith("/") or not slash or not is_known:
            return "use the whole address that `resilient ui` has printed"
        return ""

    def _send(
        self, status: int, text: str, kind: str = _TEXT, more: Mapping[str, str] | None = None
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.close_connection = True
        self.send_response(status)
        fields = {**_headers(), **(more or {}), "Content-Type": kind, "Content-Length": len(body)}
        for name, value in fields.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _headers() -> dict[str, str]:
    """Return the headers of every answer."""
    return {
        "Cache-Control": "no-store",
        "Content-Security-Policy": served_policy(),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
