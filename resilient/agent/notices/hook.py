"""An address of ours that others call: the ``preStop`` hook of a pod, an operator's curl.

``POST /stop`` with ``{"reason": ..., "seconds": ...}``, with nothing, or ``GET /stop``, which is
all that a hook of Kubernetes can do. Whoever reaches the address can stop the run, so it listens
on the loopback unless another address is named, and wants a token if one is set.
"""

from __future__ import annotations

import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from resilient.agent.notices.notice import Notice, SourceGarbled, notice_of, unix_seconds
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from resilient.clock import Clock

_BODY_BYTES_MAX = 1 << 16
_REQUEST_SECONDS = 5.0


class HookSource:
    """Listens, and remembers the last call.

    Args:
        clock: tells when a call came.
        host: address to listen at.
        port: 0 lets the system choose.
        token: what ``Authorization: Bearer`` must say; empty for no need of one.

    Raises:
        ConfigError: the address cannot be had.
    """

    every_seconds = 0.1

    def __init__(self, clock: Clock, host: str, port: int, token: str = "") -> None:
        self._clock = clock
        self._heard: Notice | None = None
        try:
            self._server = _Server((host, port), self._take, token)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--notice http: cannot listen at {host}:{port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="notice-hook", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return f"http {host!s}:{port}"

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return int(self._server.server_address[1])

    def look(self) -> Notice | None:
        """Return what the last call said."""
        return self._heard

    def acknowledge(self) -> None:
        """Do nothing: the caller has its answer."""

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, document: dict[str, Any]) -> None:
        self._heard = notice_of(document, "http", unix_seconds(self._clock))


class _Handler(BaseHTTPRequestHandler):
    """Answers one call; its server knows whom to tell."""

    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Take a call that cannot say anything."""
        self._serve()

    def do_POST(self) -> None:
        """Take a call."""
        self._serve()

    def log_message(self, *_: Any) -> None:
        """Say nothing: what matters becomes an event."""

    def _serve(self) -> None:
        token, given = self.server.token, self.headers.get("Authorization", "")
        if self.path.partition("?")[0] != "/stop":
            self._answer(404, "POST /stop")
        elif token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            self._answer(401, "a token is needed")
        else:
            self._answer(*self._hear())

    def _hear(self) -> tuple[int, str]:
        try:
            size = min(int(self.headers.get("Content-Length") or 0), _BODY_BYTES_MAX)
            body = self.rfile.read(size)
            document = json.loads(body) if body.strip() else {}
            self.server.take(document if isinstance(document, dict) else {"seconds": document})
        except (ValueError, RecursionError, SourceGarbled) as error:
            return 400, f"not understood: {error}"
        return 202, "stopping"

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], take: Any, token: str) -> None:
        self.take = take
        self.token = token
        super().__init__(address, _Handler)
