"""Ports that stay free until a server takes them.

A port that was only asked for and given back may become the near end of anybody's connection
before the server is there. One that stays bound does not; with SO_REUSEADDR on both sides
(TCPStore, Go, libuv and asio set it) a server may listen at it all the same, as long as
nobody else listens (ip(7), socket(7)).
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Yield ports of the loopback at which only who is told them will listen."""
    with ExitStack() as stack:
        yield [stack.enter_context(held_port()).getsockname()[1] for _ in range(count)]


def held_port() -> socket.socket:
    """Return what keeps a port until it is closed; ``getsockname()`` names it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
