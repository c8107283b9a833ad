"""HTTP server that answers only ``GET /metrics`` and ``GET /healthz``.

The server runs in one thread. Each connection is a task of the thread's event loop, with a deadline
and a size limit. The responses are computed before a request arrives. Slow or many clients
therefore cost the agent only the time of that thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from resilient.elastic.metrics.registry import CONTENT_TYPE
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

HEAD_BYTES_MAX = 8192
CONNECTIONS_MAX = 32
REQUEST_SECONDS = 5.0
_END_SECONDS = 5.0
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}


class MetricsServer:
    """Server that listens from its creation and answers after its start.

    Args:
        host: Address of the server.
        port: Port of the server; 0 lets the system choose.
        page: Function that returns the text of ``/metrics``; called by the server's thread.
        health: Function that returns the health and a line about it, for ``/healthz``.

    Raises:
        ConfigError: The address is not available.
    """

    def __init__(
        self,
        host: str,
        port: int,
        page: Callable[[], str],
        health: Callable[[], tuple[bool, str]],
    ) -> None:
        self._page = page
        self._health = health
        self._open = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # Resolve first: create_server leaks its socket for a name that does not resolve.
            address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
            self._socket = socket.create_server(address[:2], family=family, backlog=64)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"--metrics-port: cannot listen at {host}:{port}: {error}",
                hint="give another port, or let the system choose: --metrics-port auto",
            ) from error
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="metrics-server", daemon=True)

    @property
    def url(self) -> str:
        """URL for Prometheus."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def start(self) -> None:
        """Start to answer."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop the server and drop open requests."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has already ended.
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_END_SECONDS)
        self._socket.close()

    def _serve(self) -> None:
        loop = self._loop
        assert loop is not None, "set when the server starts"  # noqa: S101
        try:
            starting = asyncio.start_server(self._take, sock=self._socket, limit=HEAD_BYTES_MAX)
            server = loop.run_until_complete(starting)
            loop.run_forever()
            server.close()
            loop.run_until_complete(_cancel_all(asyncio.all_tasks(loop)))
        finally:
            loop.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._open >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._open += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                writer.write(await self._answer(reader))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # The client is gone or too slow.
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(400, "the request is too long\n")
        method, _, target_and_version = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        target, _, version = target_and_version.partition(" ")
        if not version.startswith("HTTP/1."):
            return _response(400, "no request\n")
        if method not in ("GET", "HEAD"):
            return _response(405, "GET\n")
        return self._page_of(target.partition("?")[0], has_body=method == "GET")

    def _page_of(self, path: str, *, has_body: bool) -> bytes:
        if path == "/metrics":
            return _response(200, self._page(), CONTENT_TYPE, has_body=has_body)
        if path == "/healthz":
            is_healthy, line = self._health()
            return _response(200 if is_healthy else 503, f"{line}\n", has_body=has_body)
        return _response(404, "GET /metrics or /healthz\n", has_body=has_body)


async def _cancel_all(tasks: Collection[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _response(status: int, text: str, kind: str = _PLAIN, *, has_body: bool = True) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Service Unavailable')}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body * has_body
