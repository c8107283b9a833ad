"""One JSON value per line over a socket: all that our processes say to each other.

Nothing received can run code, and nobody can make the reader hold more than a bound.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket

LINE_BYTES_MAX = 256 << 20
_READ_BYTES = 1 << 16


class BadLine(Exception):
    """What came is no JSON object on one line: cut short, too long, or something else."""


class Lines:
    """Sends and receives JSON objects; used by one thread at a time.

    Args:
        connection: a connected stream socket, with the timeout that one operation may take.
        line_bytes_max: longest line to take.
    """

    def __init__(self, connection: socket.socket, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._connection = connection
        self.line_bytes_max = line_bytes_max
        self._read = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one object.

        Raises:
            OSError: the other side is gone or does not read.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the next object, or None when the other side has closed.

        Raises:
            BadLine: a torn line, one longer than the bound, or not a JSON object.
            OSError: the connection broke, or nothing came within its timeout.
        """
        looked = 0
        while (end := self._read.find(b"\n", looked)) < 0:
            looked = len(self._read)
            if looked > self.line_bytes_max:
                raise BadLine(f"a line of more than {self.line_bytes_max} bytes")
            more = self._connection.recv(_READ_BYTES)
            if not more:
                if self._read:
                    raise BadLine(f"a line torn after {looked} bytes")
                return None
            self._read += more
        line = bytes(self._read[:end])
        del self._read[: end + 1]
        return _parse(line)

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the raw bytes that follow the last line.

        Raises:
            BadLine: fewer came.
            OSError: as for ``receive``.
        """
        ready = min(len(self._read), len(view))
        view[:ready] = self._read[:ready]
        del self._read[:ready]
        while ready < len(view):
            came = self._connection.recv_into(view[ready:])
            if not came:
                raise BadLine(f"cut after {ready} of {len(view)} bytes")
            ready += came

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Send raw bytes, whose number a line before has said.

        Raises:
            OSError: as for ``send``.
        """
        self._connection.sendall(data)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"not JSON: {line[:40]!r}") from error
    if not isinstance(value, dict):
        raise BadLine(f"not a JSON object: {line[:40]!r}")
    return value
