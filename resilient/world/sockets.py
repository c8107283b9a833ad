"""A Board over plain TCP sockets, for processes that must not load torch: the keepers.

One keeper serves, the others connect. A client may leave a *will*: a value that the server posts
for it when its connection ends before it has posted the key itself. So a process that dies is
heard of at once instead of at a deadline.

Source of the idea: the last will of MQTT 3.1.1, section 3.1.2.5. The token keeps apart the lives
on one port; it is no protection from someone who can listen to the network (docs/guarantees.md).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.clock import SystemClock
from resilient.errors import PeerFailed
from resilient.world.lines import LINE_BYTES_MAX, BadLine, Lines
from resilient.world.memory import MemoryBoard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.clock import Clock

# The server answers within a slice, so silence for much longer means that its host is gone.
_SLICE_SECONDS = 1.0
_SILENCE_SECONDS = 30.0
_GREETING_BYTES_MAX = 1 << 10
_KEEPALIVE_SECONDS = (10, 5, 3)
_NONSENSE = (OSError, BadLine, KeyError, TypeError, ValueError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a board is served, and the token that it asks for."""

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


class BoardServer:
    """Serves one board to any number of clients, from threads of its own.

    Args:
        listen: address to listen on; empty for all interfaces.
        host: the name under which clients reach it.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, listen: str = "127.0.0.1", host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((listen, 0))
        port = int(self._listener.getsockname()[1])
        self.address = Address(host, port, secrets.token_hex(16))
        self._board = MemoryBoard()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, name="board", daemon=True)]
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
            thread.join(2 * _SLICE_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            _keep_alive(connection)
            with self._lock:
                self._connections.add(connection)
                self._threads = [one for one in self._threads if one.is_alive()]
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="board", daemon=True
                )
                self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # A stranger may not make us hold more than a greeting, or wait for it for long.
        connection.settimeout(_SILENCE_SECONDS)
        lines, wills = Lines(connection, _GREETING_BYTES_MAX), dict[str, bytes]()
        # Whoever talks nonsense or leaves is cut off; the others are not hurt.
        with suppress(*_NONSENSE), connection:
            if self._is_known(lines.receive()):
                connection.settimeout(None)
                lines.line_bytes_max = LINE_BYTES_MAX
                while (asked := lines.receive()) is not None:
                    lines.send({"value": self._answer(asked, wills)})
        for key, value in wills.items():
            self._board.post(key, value)
        with self._lock:
            self._connections.discard(connection)

    def _is_known(self, greeting: dict[str, Any] | None) -> bool:
        token = str((greeting or {}).get("token", ""))
        return hmac.compare_digest(token.encode(), self.address.token.encode())

    def _answer(self, asked: dict[str, Any], wills: dict[str, bytes]) -> Any:
        verb, keys = asked["verb"], [str(key) for key in asked["keys"]]
        if verb == "wait":
            within_seconds = min(float(asked["within_seconds"]), _SLICE_SECONDS)
            values = self._board.wait(keys, within_seconds)
            return None if values is None else [_text(one) for one in values]
        (key,) = keys
        if verb == "post":
            wills.pop(key, None)
            self._board.post(key, _bytes(asked["value"]))
        elif verb == "peek":
            held = self._board.peek(key)
            return None if held is None else _text(held)
        elif verb == "remove":
            self._board.remove(key)
        elif verb == "will":
            wills[key] = _bytes(asked["value"])
        else:
            raise ValueError(verb)
        return None


class SocketBoard:
    """A client's view of a board that a :class:`BoardServer` serves.

    Args:
        address: where.
        clock: for the deadline of a wait.

    Raises:
        PeerFailed: nobody serves there.
    """

    def __init__(self, address: Address, clock: Clock | None = None) -> None:
        self._address = address
        self._clock = clock or SystemClock()
        try:
            connection = socket.create_connection((address.host, address.port), _SILENCE_SECONDS)
            _keep_alive(connection)
            self._lines = Lines(connection)
            self._lines.send({"token": address.token})
        except OSError as error:
            raise self._gone(error) from error

    def post(self, key: str, value: bytes) -> None:
        """Set ``key`` on the server; a will for it is void."""
        self._ask(verb="post", keys=[key], value=_text(value))

    def will(self, key: str, value: bytes) -> None:
        """Have the server post ``value`` if this connection ends before ``key`` was posted."""
        self._ask(verb="will", keys=[key], value=_text(value))

    def peek(self, key: str) -> bytes | None:
        """Ask the server once; never waits for another client."""
        held = self._ask(verb="peek", keys=[key])
        return None if held is None else _bytes(held)

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Wait for all ``keys``, asking again each second, so that neither side hangs."""
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        while True:
            left_seconds = max(deadline_seconds - self._clock.monotonic_seconds(), 0.0)
            held = self._ask(verb="wait", keys=list(keys), within_seconds=left_seconds)
            if held is not None:
                return [_bytes(one) for one in held]
            if left_seconds <= _SLICE_SECONDS:
                return None

    def remove(self, key: str) -> None:
        """Delete ``key`` on the server."""
        self._ask(verb="remove", keys=[key])

    def another(self) -> SocketBoard:
        """Open a second connection to the same server."""
        return SocketBoard(self._address, self._clock)

    def close(self) -> None:
        """End the connection; what was left as a will is posted."""
        self._lines.close()

    def _ask(self, **message: Any) -> Any:
        try:
            self._lines.send(message)
            answer = self._lines.receive()
        except (OSError, BadLine) as error:
            raise self._gone(error) from error
        if answer is None:
            raise self._gone("it closed the connection")
        return answer.get("value")

    def _gone(self, why: object) -> PeerFailed:
        where = f"{self._address.host}:{self._address.port}"
        return PeerFailed(f"the keepers' board at {where} is gone: {why}", rank=0)


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel notice within 25 s that the other host vanished without a word."""
    idle, interval, count = _KEEPALIVE_SECONDS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
