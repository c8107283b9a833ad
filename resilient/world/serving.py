"""Serve whoever knows a token over plain TCP, a thread for each connection.

The token keeps apart the lives on one port; it is no protection from someone who can listen to
the network (docs/guarantees.md).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.world.lines import LINE_BYTES_MAX, BadLine, Lines

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPBACK = "127.0.0.1"
ANYWHERE = ""
SILENCE_SECONDS = 30.0
NONSENSE = (OSError, BadLine, KeyError, TypeError, ValueError, AttributeError, OverflowError)
_JOIN_SECONDS = 2.0
_GREETING_BYTES_MAX = 1 << 10
_KEEPALIVE_SECONDS = (10, 5, 3)


@dataclass(frozen=True, slots=True)
class Address:
    """Where something is served, and the token that it asks for."""

    host: str
    port: int
    token: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {"host": self.host, "port": self.port, "token": self.token}

    @staticmethod
    def from_json(value: Any) -> Address:
        """Return the address that ``to_json`` described."""
        return Address(str(value["host"]), int(value["port"]), str(value["token"]))


class Server:
    """Accepts connections, and hands each that greets with the token to ``serve``.

    Args:
        serve: talks with one client until it leaves; what of ``NONSENSE`` it raises ends the
            talk and hurts nobody else.
        listen: address to listen on; empty for all interfaces.
        host: the name under which clients reach it.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(
        self,
        serve: Callable[[Lines], None],
        listen: str = LOOPBACK,
        host: str = LOOPBACK,
    ) -> None:
        family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        self._listener = socket.create_server((listen, 0), family=family)
        port = int(self._listener.getsockname()[1])
        self.address = Address(host, port, secrets.token_hex(16))
        self._serve = serve
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="server", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """Stop to serve; clients that still ask learn that the place is gone."""
        # Closing alone would not wake the thread that waits in accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            keep_alive(connection)
            with self._lock:
                self._connections.add(connection)
                self._threads = [one for one in self._threads if one.is_alive()]
                thread = threading.Thread(
                    target=self._greet, args=(connection,), name="server", daemon=True
                )
                self._threads.append(thread)
            thread.start()

    def _greet(self, connection: socket.socket) -> None:
        # A stranger may not make us hold more than a greeting, or wait for it for long.
        connection.settimeout(SILENCE_SECONDS)
        lines = Lines(connection, _GREETING_BYTES_MAX)
        # Whoever talks nonsense or leaves is cut off; the others are not hurt.
        with suppress(*NONSENSE), connection:
            if self._is_known(lines.receive()):
                connection.settimeout(None)
                lines.line_bytes_max = LINE_BYTES_MAX
                self._serve(lines)
        with self._lock:
            self._connections.discard(connection)

    def _is_known(self, greeting: dict[str, Any] | None) -> bool:
        token = str((greeting or {}).get("token", ""))
        return hmac.compare_digest(token.encode(), self.address.token.encode())


def greeted(address: Address) -> socket.socket:
    """Return a connection to a :class:`Server` that has been shown the token.

    Raises:
        OSError: nobody serves there.
    """
    connection = socket.create_connection((address.host, address.port), SILENCE_SECONDS)
    try:
        keep_alive(connection)
        Lines(connection).send({"token": address.token})
    except OSError:
        connection.close()
        raise
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within 25 s that the other host vanished without a word."""
    idle, interval, count = _KEEPALIVE_SECONDS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    limit_silence(connection, idle + interval * count)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Have the kernel end a connection when what was sent is not acknowledged for so long.

    Probes alone do not notice that while something is on its way (tcp(7), TCP_USER_TIMEOUT): it
    is sent again and again, a quarter of an hour by default.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def listen_for(host: str) -> str:
    """Return where to listen so that ``host`` leads here: on the loopback if that does."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return host if host == "::1" else LOOPBACK
    return ANYWHERE


def address_toward(host: str, port: int) -> str:
    """Return the address of this host on the way to another one; nothing is sent.

    Raises:
        OSError: the name leads nowhere.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket only looks the route up (connect(2)).
        probe.connect(place)
        return str(probe.getsockname()[0])
