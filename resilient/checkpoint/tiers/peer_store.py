"""Near repositories of other hosts, read over TCP, and the groups of ranks that share a repository.

A near repository is fast storage for the checkpoints of one or several hosts, such as a local disk.
Each host serves only the checkpoints and generation records (one per attempt) of its near
repository, to peers that have the token of this attempt. Other hosts cannot write to the
repository.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from resilient.clock import SystemClock
from resilient.distributed.kv_store import (
    JsonLineSocket,
    MalformedMessage,
    TcpServer,
    greeted,
    listen_for,
)
from resilient.errors import KeyNotFound, ResilientError, StoreDenied, StoreUnavailable
from resilient.format.keys import parse_generation, split_checkpoint_key
from resilient.storage.store import ObjectInfo, is_key
from resilient.storage.transfer import MultipartConfig, ScatterBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.clock import Clock
    from resilient.distributed.kv_store import Address
    from resilient.storage.store import Data, Store
    from resilient.storage.transfer import Arrived

PIECE_BYTES_MAX = 8 << 20
"""Largest piece that one request returns."""

_RETRY_SECONDS = (1.0, 30.0)


class PeerServer(TcpServer):
    """Read-only server of a near repository for other hosts.

    Args:
        near: Repository to serve.
        host: Name by which other hosts reach this host.

    Raises:
        OSError: The server cannot listen.
    """

    def __init__(self, near: Store, host: str) -> None:
        self._near = near
        super().__init__(self._serve, listen_for(host), host)

    def _serve(self, connection: JsonLineSocket) -> None:
        while (request := connection.receive()) is not None:
            data = b""
            try:
                response, data = _answer(self._near, request)
            except KeyNotFound:
                response = {"is_missing": True}
            except ResilientError as error:
                response = {"failed": error.message}
            connection.send(response)
            connection.send_bytes(data)


def _answer(near: Store, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the response and the bytes that follow it; the request is not trusted.

    Raises:
        KeyNotFound: There is no such object, or none that other hosts may read.
        StoreError: The repository failed.
        ValueError: The request is not valid.
    """
    verb, key = request["verb"], str(request["key"])
    if verb == "list" and is_key(key.removesuffix("/")):
        entries = [[info.key, info.size_bytes] for info in near.list(key) if _may_be_read(info.key)]
        return {"entries": entries}, b""
    if not _may_be_read(key):
        raise KeyNotFound(f"`{key:.80}` is not served", key="")
    if verb == "stat":
        return {"size_bytes": near.stat(key).size_bytes}, b""
    start, length = int(request["start"]), int(request["length"])
    if verb != "read" or start < 0 or not 0 <= length <= PIECE_BYTES_MAX:
        raise ValueError(verb)
    data = near.get_range(key, start, length)
    return {"size_bytes": len(data)}, data


def _may_be_read(key: str) -> bool:
    return split_checkpoint_key(key) is not None or parse_generation(key) is not None


class PeerStore:
    """Read-only Store over the objects that a :class:`PeerServer` serves.

    After a failed connection, the next try is 1 s later. Each further failure doubles this time, up
    to 30 s. Requests in that time fail at once.

    Args:
        address: Address of the server.
        url: Name for people.
        clock: Time source.
    """

    def __init__(self, address: Address, url: str, clock: Clock | None = None) -> None:
        self.url = url
        self.exclusive = False
        self.ranges = MultipartConfig(PIECE_BYTES_MAX, in_flight=4)
        self.address = address
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[JsonLineSocket] = []
        self._clock = clock or SystemClock()
        self._retry_seconds = 0.0
        self._retry_at_seconds = 0.0

    def connect_now(self) -> None:
        """Connect now, to detect an unreachable host early.

        Raises:
            StoreUnavailable: No server answers there.
        """
        connection = self._connect()
        with self._lock:
            self._idle.append(connection)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        size_bytes = self.stat(key).size_bytes
        data = bytearray(size_bytes)
        read_bytes = self.fill(
            key, 0, ScatterBuffer([memoryview(data)]), lambda _begin, _stop: None
        )
        return bytes(data[:read_bytes])

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return part of an object; fewer bytes only at its end."""
        data = bytearray(length)
        read_bytes = self.fill(
            key, start, ScatterBuffer([memoryview(data)]), lambda _begin, _stop: None
        )
        return bytes(data[:read_bytes])

    def fill(self, key: str, start: int, buffer: ScatterBuffer, on_arrival: Arrived) -> int:
        """Fill ``buffer`` from offset ``start``, piece by piece."""
        filled_bytes = 0
        while filled_bytes < len(buffer):
            piece = buffer.part(filled_bytes, filled_bytes + PIECE_BYTES_MAX)
            response = self._ask(
                piece, verb="read", key=key, start=start + filled_bytes, length=len(piece)
            )
            filled_bytes += response["size_bytes"]
            on_arrival(filled_bytes - response["size_bytes"], filled_bytes)
            if response["size_bytes"] < len(piece):
                break
        return filled_bytes

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """Return the served objects under ``prefix``."""
        entries = self._ask(verb="list", key=prefix)["entries"]
        return [ObjectInfo(str(key), int(size_bytes)) for key, size_bytes in entries]

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's entry."""
        return ObjectInfo(key, int(self._ask(verb="stat", key=key)["size_bytes"]))

    def put(self, key: str, data: Data) -> NoReturn:
        """Refuse."""
        del data
        raise StoreDenied(f"{self.url} is read-only from here", key=key)

    def put_new(self, key: str, data: Data) -> NoReturn:
        """Refuse."""
        self.put(key, data)

    def delete(self, key: str) -> NoReturn:
        """Refuse."""
        self.put(key, b"")

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, buffer: ScatterBuffer | None = None, **request: Any) -> dict[str, Any]:
        """Send a request over a connection that no other thread uses meanwhile.

        Raises:
            KeyNotFound: There is no such object.
            StoreUnavailable: The host does not answer, or its disk failed.
        """
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connect()
        try:
            response = self._read_answer(connection, buffer, request)
        except (OSError, MalformedMessage, KeyError, TypeError, ValueError) as error:
            connection.close()
            raise self._unreachable_error(repr(error)) from error
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()
        if "is_missing" in response:
            raise KeyNotFound(f"no `{request['key']}` at {self.url}", key=request["key"])
        if "failed" in response:
            raise StoreUnavailable(f"{self.url}: {response['failed']}", key=request["key"])
        return response

    @staticmethod
    def _read_answer(
        connection: JsonLineSocket, buffer: ScatterBuffer | None, request: dict[str, Any]
    ) -> dict[str, Any]:
        connection.send(request)
        response = connection.receive()
        if response is None:
            raise MalformedMessage("the connection was closed")
        if buffer is not None and "size_bytes" in response:
            size_bytes = int(response["size_bytes"])
            if not 0 <= size_bytes <= len(buffer):
                raise ValueError(f"{size_bytes} of {len(buffer)} bytes")
            for piece in buffer.cut(0, size_bytes):
                connection.receive_into(piece)
        return response

    def _connect(self) -> JsonLineSocket:
        left_seconds = self._retry_at_seconds - self._clock.monotonic_seconds()
        if left_seconds > 0:
            raise self._unreachable_error(
                f"no answer before; the next try is in {left_seconds:.1f} s"
            )
        try:
            connection = JsonLineSocket(greeted(self.address))
        except OSError as error:
            shortest, longest = _RETRY_SECONDS
            self._retry_seconds = min(max(2 * self._retry_seconds, shortest), longest)
            self._retry_at_seconds = self._clock.monotonic_seconds() + self._retry_seconds
            raise self._unreachable_error(repr(error)) from error
        self._retry_seconds = 0.0
        return connection

    def _unreachable_error(self, why: str) -> StoreUnavailable:
        address_text = f"{self.address.host}:{self.address.port}"
        return StoreUnavailable(f"{self.url} does not answer at {address_text}: {why}")


@dataclass(frozen=True, slots=True)
class NearTierGroups:
    """Ranks of an attempt, grouped by the near repository that they see.

    Attributes:
        groups: Ranks of each near repository in rising order, sorted by their lowest rank; empty if
            all ranks see the same repository, or there is none.
    """

    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def leaders(self) -> tuple[int, ...]:
        """Lowest rank of each place, which manages the place; the coordinator is the first."""
        return tuple(group[0] for group in self.groups) or (0,)

    def number(self, rank: int) -> int:
        """Return the number of a rank's place, from 0."""
        return next((at for at, group in enumerate(self.groups) if rank in group), 0)

    def is_leader(self, rank: int) -> bool:
        """Return whether a rank manages its place."""
        return rank in self.leaders
