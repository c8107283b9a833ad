"""Key-value store for small values of all ranks of an attempt: in memory and over TCP sockets.

The socket store serves the saver daemons, which write checkpoints (one per host) and must not load
torch. One daemon runs the server, and the other daemons connect. A client may leave a *failure
notice* (``will``) for a key. The server posts this value if the connection of the client ends
before the client has posted the key. Other clients therefore notice the death of a process at once
instead of at a deadline. The idea is the "last will" of MQTT 3.1.1, section 3.1.2.5.

Messages are one JSON value per line. No received value can run code, and no sender can make the
reader buffer more than a fixed limit. The server has one thread per connection, and accepts only
clients that know the token of the attempt. A client of another attempt on the same port is
therefore rejected. The token does not protect against an attacker who can read the network traffic
(docs/guarantees.md).
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from resilient.clock import SystemClock
from resilient.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.clock import Clock

LINE_BYTES_MAX = 256 << 20
_READ_BYTES = 1 << 16


class MalformedMessage(Exception):
    """A received line is not a JSON object, is incomplete or is too long."""


class JsonLineSocket:
    """Sender and receiver of JSON objects; used by one thread at a time.

    Args:
        connection: Connected stream socket, with the timeout of one operation.
        line_bytes_max: Maximum length of a received line.
    """

    def __init__(self, connection: socket.socket, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._connection = connection
        self.line_bytes_max = line_bytes_max
        self._read = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one object.

        Raises:
            OSError: The peer is gone or does not read.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next object, or None if the peer has closed.

        Raises:
            MalformedMessage: The line is incomplete, too long, or not a JSON object.
            OSError: The connection broke, or nothing came within its timeout.
        """
        scanned_bytes = 0
        while (end := self._read.find(b"\n", scanned_bytes)) < 0:
            scanned_bytes = len(self._read)
            if scanned_bytes > self.line_bytes_max:
                raise MalformedMessage(f"a line of more than {self.line_bytes_max} bytes")
            chunk = self._connection.recv(_READ_BYTES)
            if not chunk:
                if self._read:
                    raise MalformedMessage(f"a line cut off after {scanned_bytes} bytes")
                return None
            self._read += chunk
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return _parse(line)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the raw bytes that follow the last line.

        Raises:
            MalformedMessage: Fewer bytes came.
            OSError: As for ``receive``.
        """
        filled_bytes = min(len(self._read), len(view))
        view[:filled_bytes] = self._read[:filled_bytes]
        del self._read[:filled_bytes]
        while filled_bytes < len(view):
            received_bytes = self._connection.recv_into(view[filled_bytes:])
            if not received_bytes:
                raise MalformedMessage(f"cut off after {filled_bytes} of {len(view)} bytes")
            filled_bytes += received_bytes

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send raw bytes, whose number a previous line has announced.

        Raises:
            OSError: As for ``send``.
        """
        self._connection.sendall(data)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"not JSON: {line[:40]!r}") from error
    if not isinstance(value, dict):
        raise MalformedMessage(f"not a JSON object: {line[:40]!r}")
    return value


LOOPBACK = "127.0.0.1"
ALL_INTERFACES = ""
SILENCE_SECONDS = 30.0
NONSENSE = (
    OSError,
    MalformedMessage,
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
)
"""Errors of a broken connection, or of a message that does not follow the protocol."""
_JOIN_SECONDS = 2.0
_TOKEN_MESSAGE_BYTES_MAX = 1 << 10
_KEEPALIVE_SECONDS = (10, 5, 3)


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server, and the token that it requires."""

    host: str
    port: int
    token: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        return {"host": self.host, "port": self.port, "token": self.token}

    @staticmethod
    def from_json(value: Any) -> Address:
        """Parse the output of ``to_json``."""
        return Address(str(value["host"]), int(value["port"]), str(value["token"]))


class TcpServer:
    """TCP server that passes each connection with a valid token to ``serve``.

    Args:
        serve: Function that serves one client until the client disconnects. An error in
            ``NONSENSE`` ends this connection and affects no other client.
        listen: Address to listen on; empty for all interfaces.
        host: Name under which clients reach the server.

    Raises:
        OSError: The server cannot listen there.
    """

    def __init__(
        self,
        serve: Callable[[JsonLineSocket], None],
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
        """Stop serving; requests that clients still send then fail."""
        # A close alone would not wake the thread that waits in accept.
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
                self._threads = [worker for worker in self._threads if worker.is_alive()]
                thread = threading.Thread(
                    target=self._authenticate, args=(connection,), name="server", daemon=True
                )
                self._threads.append(thread)
            thread.start()

    def _authenticate(self, connection: socket.socket) -> None:
        # A client without a token can make this process neither buffer much nor wait for long.
        connection.settimeout(SILENCE_SECONDS)
        channel = JsonLineSocket(connection, _TOKEN_MESSAGE_BYTES_MAX)
        # A client that sends invalid data is disconnected; other clients are not affected.
        with suppress(*NONSENSE), connection:
            if self._has_valid_token(channel.receive()):
                connection.settimeout(None)
                channel.line_bytes_max = LINE_BYTES_MAX
                self._serve(channel)
        with self._lock:
            self._connections.discard(connection)

    def _has_valid_token(self, token_message: dict[str, Any] | None) -> bool:
        token = str((token_message or {}).get("token", ""))
        return hmac.compare_digest(token.encode(), self.address.token.encode())


def greeted(address: Address) -> socket.socket:
    """Connect to a :class:`TcpServer` and send the token.

    Raises:
        OSError: No server listens at the address.
    """
    connection = socket.create_connection((address.host, address.port), SILENCE_SECONDS)
    try:
        keep_alive(connection)
        JsonLineSocket(connection).send({"token": address.token})
    except OSError:
        connection.close()
        raise
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within 25 s that the other host vanished silently."""
    idle_seconds, interval, count = _KEEPALIVE_SECONDS
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    limit_silence(connection, idle_seconds + interval * count)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Make the kernel end a connection if sent data is not acknowledged for ``seconds``.

    Keep-alive probes do not detect a lost peer while data is in flight (tcp(7), TCP_USER_TIMEOUT).
    By default the kernel then retransmits for 15 minutes.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def listen_for(host: str) -> str:
    """Return the listen address for ``host``: the loopback if ``host`` is a loopback address."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return host if host == "::1" else LOOPBACK
    return ALL_INTERFACES


def address_toward(host: str, port: int) -> str:
    """Return the address of this host on the route to another host; nothing is sent.

    Raises:
        OSError: The name cannot be resolved or reached.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # connect on a datagram socket only looks up the route (connect(2)).
        probe.connect(place)
        return str(probe.getsockname()[0])


class InMemoryKVStore:
    """A key-value store for threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._failure: PeerFailed | None = None
        self._condition = threading.Condition()

    def post(self, key: str, value: bytes) -> None:
        """Set ``key`` and wake all waiting threads."""
        with self._condition:
            self._values[key] = value
            self._condition.notify_all()

    def peek(self, key: str) -> bytes | None:
        """Return the value or None."""
        with self._condition:
            return self._values.get(key)

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Return all values once posted, or None after ``within_seconds``."""
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._failure or all(key in self._values for key in keys), within_seconds
            ):
                return None
            if self._failure:
                raise self._failure
            return [self._values[key] for key in keys]

    def remove(self, key: str) -> None:
        """Delete ``key``."""
        with self._condition:
            self._values.pop(key, None)

    def fail(self, error: PeerFailed) -> None:
        """Break the store permanently, as if the server's host died: all waits raise."""
        with self._condition:
            self._failure = error
            self._condition.notify_all()

    def another(self) -> InMemoryKVStore:
        """Return this store, which is safe for many threads."""
        return self

    def here(self) -> str:
        """Return the loopback address, because all users are in this process."""
        return LOOPBACK


# The server answers a wait request within this time. A much longer silence means that its host is
# down.
_WAIT_SLICE_SECONDS = 1.0


class KVStoreServer(TcpServer):
    """Server of one key-value store for any number of clients, with its own threads.

    Args:
        listen: Address to listen on; empty for all interfaces.
        host: Name under which clients reach the server.

    Raises:
        OSError: The server cannot listen there.
    """

    def __init__(self, listen: str = LOOPBACK, host: str = LOOPBACK) -> None:
        self._store = InMemoryKVStore()
        super().__init__(self._serve_client, listen, host)

    def _serve_client(self, channel: JsonLineSocket) -> None:
        notices = dict[str, bytes]()
        try:
            while (request := channel.receive()) is not None:
                channel.send({"value": self._answer(request, notices)})
        finally:
            for key, value in notices.items():
                self._store.post(key, value)

    def _answer(self, request: dict[str, Any], notices: dict[str, bytes]) -> Any:
        verb, keys = request["verb"], [str(key) for key in request["keys"]]
        if verb == "wait":
            within_seconds = min(float(request["within_seconds"]), _WAIT_SLICE_SECONDS)
            values = self._store.wait(keys, within_seconds)
            return None if values is None else [_text(value) for value in values]
        (key,) = keys
        if verb == "post":
            notices.pop(key, None)
            self._store.post(key, _bytes(request["value"]))
        elif verb == "peek":
            stored_value = self._store.peek(key)
            return None if stored_value is None else _text(stored_value)
        elif verb == "remove":
            self._store.remove(key)
        elif verb == "will":
            notices[key] = _bytes(request["value"])
        else:
            raise ValueError(verb)
        return None


class SocketKVStore:
    """Client of a key-value store that a :class:`KVStoreServer` serves.

    Args:
        address: Address of the server.
        clock: Clock for the deadline of a wait.

    Raises:
        PeerFailed: No server is there.
    """

    def __init__(self, address: Address, clock: Clock | None = None) -> None:
        self._address = address
        self._clock = clock or SystemClock()
        try:
            self._connection = greeted(address)
            self._channel = JsonLineSocket(self._connection)
        except OSError as error:
            raise self._unreachable_error(error) from error

    def post(self, key: str, value: bytes) -> None:
        """Set ``key`` on the server; this cancels a failure notice for the key."""
        self._ask(verb="post", keys=[key], value=_text(value))

    def will(self, key: str, value: bytes) -> None:
        """Make the server post ``value`` if this connection ends before ``key`` was posted."""
        self._ask(verb="will", keys=[key], value=_text(value))

    def peek(self, key: str) -> bytes | None:
        """Ask the server once; never waits for another client."""
        value = self._ask(verb="peek", keys=[key])
        return None if value is None else _bytes(value)

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Wait for all ``keys``, with a new request each second, so that neither side hangs."""
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        while True:
            remaining_seconds = max(deadline_seconds - self._clock.monotonic_seconds(), 0.0)
            values = self._ask(verb="wait", keys=list(keys), within_seconds=remaining_seconds)
            if values is not None:
                return [_bytes(value) for value in values]
            if remaining_seconds <= _WAIT_SLICE_SECONDS:
                return None

    def remove(self, key: str) -> None:
        """Delete ``key`` on the server."""
        self._ask(verb="remove", keys=[key])

    def another(self) -> SocketKVStore:
        """Open a second connection to the same server."""
        return SocketKVStore(self._address, self._clock)

    def here(self) -> str:
        """Return the local address of the connection."""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        """Close the connection; the server then posts the remaining failure notices."""
        self._channel.close()

    def _ask(self, **message: Any) -> Any:
        try:
            self._channel.send(message)
            answer = self._channel.receive()
        except (OSError, MalformedMessage) as error:
            raise self._unreachable_error(error) from error
        if answer is None:
            raise self._unreachable_error("the connection was closed")
        return answer.get("value")

    def _unreachable_error(self, why: object) -> PeerFailed:
        address_text = f"{self._address.host}:{self._address.port}"
        return PeerFailed(
            f"the key-value store of the saver daemons at {address_text} is unreachable: {why}",
            rank=0,
        )


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


class KVStore(Protocol):
    """Operations over keys with bytes as values, without the collective backend.

    One thread at a time may use a store; ``another`` opens a store for a second thread.
    """

    def post(self, key: str, value: bytes) -> None:
        """Set ``key``; the last value wins.

        Raises:
            PeerFailed: The server is gone (its host died).
        """

    def peek(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if it was not posted yet; never waits."""

    def wait(self, keys: Sequence[str], within_seconds: float) -> list[bytes] | None:
        """Return the values of all ``keys`` once posted, or None after the deadline."""

    def remove(self, key: str) -> None:
        """Delete ``key``; a missing key is no error."""

    def another(self) -> KVStore:
        """Open the same store for use by another thread."""

    def here(self) -> str:
        """Return the address of this host as the other clients reach it."""


@runtime_checkable
class Closeable(Protocol):
    """A key-value store with a connection that must be closed."""

    def close(self) -> None:
        """Close the connection."""
