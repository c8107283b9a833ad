"""A Board over plain TCP sockets, for processes that must not load torch: the keepers.

One keeper serves, the others connect. A client may leave a *will*: a value that the server posts
for it when its connection ends before it has posted the key itself. So a process that dies is
heard of at once instead of at a deadline.

Source of the idea: the last will of MQTT 3.1.1, section 3.1.2.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.clock import SystemClock
from resilient.errors import PeerFailed
from resilient.world.lines import BadLine, Lines
from resilient.world.memory import MemoryBoard
from resilient.world.serving import LOOPBACK, Address, Server, greeted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.clock import Clock

# The server answers within a slice, so silence for much longer means that its host is gone.
_SLICE_SECONDS = 1.0


class BoardServer(Server):
    """Serves one board to any number of clients, from threads of its own.

    Args:
        listen: address to listen on; empty for all interfaces.
        host: the name under which clients reach it.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, listen: str = LOOPBACK, host: str = LOOPBACK) -> None:
        self._board = MemoryBoard()
        super().__init__(self._converse, listen, host)

    def _converse(self, lines: Lines) -> None:
        wills = dict[str, bytes]()
        try:
            while (asked := lines.receive()) is not None:
                lines.send({"value": self._answer(asked, wills)})
        finally:
            for key, value in wills.items():
                self._board.post(key, value)

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
            self._connection = greeted(address)
            self._lines = Lines(self._connection)
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

    def here(self) -> str:
        """Return the end of the connection that is on this host."""
        return str(self._connection.getsockname()[0])

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


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
