"""The near repository of another host, read over the network: what this host has not by itself.

Each host serves what its near repository holds of checkpoints and of the records of lives, and
nothing else, to those who know this life's token. It cannot be written from elsewhere.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NoReturn

from resilient.clock import SystemClock
from resilient.errors import KeyNotFound, ResilientError, StoreDenied, StoreUnavailable
from resilient.format.names import parse_generation, split_checkpoint_key
from resilient.storage.buffers import Room
from resilient.storage.parts import Parts
from resilient.storage.store import Entry, is_key
from resilient.world.lines import BadLine, Lines
from resilient.world.serving import Server, greeted, listen_for

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.clock import Clock
    from resilient.storage.filling import Arrived
    from resilient.storage.store import Data, Store
    from resilient.world.serving import Address

PIECE_BYTES_MAX = 8 << 20
"""Longest piece that one request brings."""

_REST_SECONDS = (1.0, 30.0)


class PeerServer(Server):
    """Lets other hosts read a near repository.

    Args:
        near: the repository.
        host: this host's name as the others reach it.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, near: Store, host: str) -> None:
        self._near = near
        super().__init__(self._converse, listen_for(host), host)

    def _converse(self, lines: Lines) -> None:
        while (asked := lines.receive()) is not None:
            data = b""
            try:
                answer, data = _answer(self._near, asked)
            except KeyNotFound:
                answer = {"is_missing": True}
            except ResilientError as error:
                answer = {"failed": error.message}
            lines.send(answer)
            lines.send_bytes(data)


def _answer(near: Store, asked: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return what to say, and the bytes that follow; whatever was asked is not trusted.

    Raises:
        KeyNotFound: no such object, or none that may be read from elsewhere.
        StoreError: the repository failed.
        ValueError: nonsense was asked.
    """
    verb, key = asked["verb"], str(asked["key"])
    if verb == "list" and is_key(key.removesuffix("/")):
        found = [[one.key, one.size_bytes] for one in near.list(key) if _may_be_read(one.key)]
        return {"entries": found}, b""
    if not _may_be_read(key):
        raise KeyNotFound(f"`{key:.80}` is not served", key="")
    if verb == "stat":
        return {"size_bytes": near.stat(key).size_bytes}, b""
    start, length = int(asked["start"]), int(asked["length"])
    if verb != "read" or start < 0 or not 0 <= length <= PIECE_BYTES_MAX:
        raise ValueError(verb)
    data = near.get_range(key, start, length)
    return {"size_bytes": len(data)}, data


def _may_be_read(key: str) -> bool:
    return split_checkpoint_key(key) is not None or parse_generation(key) is not None


class PeerStore:
    """A Store over what a :class:`PeerServer` serves; it can only be read.

    A host that could not be reached is left alone for a second, then for twice as long each time,
    up to half a minute: whoever asks meanwhile is told at once that it does not answer.

    Args:
        address: where.
        url: what to call it.
        clock: time.
    """

    def __init__(self, address: Address, url: str, clock: Clock | None = None) -> None:
        self.url = url
        self.exclusive = False
        self.ranges = Parts(PIECE_BYTES_MAX, in_flight=4)
        self.address = address
        self._lock = threading.Lock()
        self._is_closed = False
        self._free: list[Lines] = []
        self._clock = clock or SystemClock()
        self._rest_seconds = 0.0
        self._alone_until_seconds = 0.0

    def reach(self) -> None:
        """Connect now, so that it is known early that nobody can.

        Raises:
            StoreUnavailable: nobody serves there.
        """
        lines = self._connect()
        with self._lock:
            self._free.append(lines)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        size_bytes = self.stat(key).size_bytes
        data = bytearray(size_bytes)
        came = self.fill(key, 0, Room([memoryview(data)]), lambda _begin, _stop: None)
        return bytes(data[:came])

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return part of an object; fewer bytes only at its end."""
        data = bytearray(length)
        came = self.fill(key, start, Room([memoryview(data)]), lambda _begin, _stop: None)
        return bytes(data[:came])

    def fill(self, key: str, start: int, room: Room, arrived: Arrived) -> int:
        """Fill ``room`` from offset ``start``, piece by piece."""
        done = 0
        while done < len(room):
            piece = room.part(done, done + PIECE_BYTES_MAX)
            came = self._ask(piece, verb="read", key=key, start=start + done, length=len(piece))
            done += came["size_bytes"]
            arrived(done - came["size_bytes"], done)
            if came["size_bytes"] < len(piece):
                break
        return done

    def list(self, prefix: str = "") -> Iterable[Entry]:
        """Return what is served under ``prefix``."""
        found = self._ask(verb="list", key=prefix)["entries"]
        return [Entry(str(key), int(size_bytes)) for key, size_bytes in found]

    def stat(self, key: str) -> Entry:
        """Return an object's entry."""
        return Entry(key, int(self._ask(verb="stat", key=key)["size_bytes"]))

    def put(self, key: str, data: Data) -> NoReturn:
        """Refuse."""
        del data
        raise StoreDenied(f"{self.url} can only be read from here", key=key)

    def put_new(self, key: str, data: Data) -> NoReturn:
        """Refuse."""
        self.put(key, data)

    def delete(self, key: str) -> NoReturn:
        """Refuse."""
        self.put(key, b"")

    def close(self) -> None:
        """Leave."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
        for lines in free:
            lines.close()

    def _ask(self, room: Room | None = None, **asked: Any) -> dict[str, Any]:
        """Ask over a connection that nobody else uses meanwhile.

        Raises:
            KeyNotFound: no such object there.
            StoreUnavailable: that host does not answer, or its disk failed.
        """
        with self._lock:
            lines = self._free.pop() if self._free else None
        lines = lines or self._connect()
        try:
            answer = self._said(lines, room, asked)
        except (OSError, BadLine, KeyError, TypeError, ValueError) as error:
            lines.close()
            raise self._silent(repr(error)) from error
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._free.append(lines)
        if not is_kept:
            lines.close()
        if "is_missing" in answer:
            raise KeyNotFound(f"no `{asked['key']}` at {self.url}", key=asked["key"])
        if "failed" in answer:
            raise StoreUnavailable(f"{self.url}: {answer['failed']}", key=asked["key"])
        return answer

    @staticmethod
    def _said(lines: Lines, room: Room | None, asked: dict[str, Any]) -> dict[str, Any]:
        lines.send(asked)
        answer = lines.receive()
        if answer is None:
            raise BadLine("it closed the connection")
        if room is not None and "size_bytes" in answer:
            size_bytes = int(answer["size_bytes"])
            if not 0 <= size_bytes <= len(room):
                raise ValueError(f"{size_bytes} of {len(room)} bytes")
            for piece in room.cut(0, size_bytes):
                lines.receive_into(piece)
        return answer

    def _connect(self) -> Lines:
        left_seconds = self._alone_until_seconds - self._clock.monotonic_seconds()
        if left_seconds > 0:
            raise self._silent(f"it did not before, and is asked again in {left_seconds:.1f} s")
        try:
            lines = Lines(greeted(self.address))
        except OSError as error:
            shortest, longest = _REST_SECONDS
            self._rest_seconds = min(max(2 * self._rest_seconds, shortest), longest)
            self._alone_until_seconds = self._clock.monotonic_seconds() + self._rest_seconds
            raise self._silent(repr(error)) from error
        self._rest_seconds = 0.0
        return lines

    def _silent(self, why: str) -> StoreUnavailable:
        where = f"{self.address.host}:{self.address.port}"
        return StoreUnavailable(f"{self.url} does not answer at {where}: {why}")
