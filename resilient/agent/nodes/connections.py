"""The agent's connections to the rendezvous, which torch opens and keeps to itself."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.world.serving import limit_silence

if TYPE_CHECKING:
    from collections.abc import Iterator


def limit_silence_toward(port: int, seconds: float) -> None:
    """Let calls to a store at ``port`` fail when its host vanishes without a word.

    Torch's store waits for an answer no longer than its timeout, then takes the question back
    and waits for the answer to that without end (2.13: ``TCPStore::doWait``).

    Args:
        port: of the store, on whichever host.
        seconds: of silence until the kernel ends a connection.
    """
    for connection in _open_sockets():
        with suppress(OSError):
            if connection.getpeername()[1] == port:
                limit_silence(connection, seconds)


def is_served_here(handler: Any) -> bool:
    """Say whether the store of a rendezvous ends with this process.

    Torch does not tell which of several agents on a host has come first and listens.
    """
    port = getattr(getattr(handler, "_store", None), "port", None)
    return port is not None and any(_listens_at(one, port) for one in _open_sockets())


def _listens_at(one: socket.socket, port: int) -> bool:
    with suppress(OSError):
        is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and one.getsockname()[1] == port
    return False


def _open_sockets() -> Iterator[socket.socket]:
    """Yield a copy of each TCP socket that is open here, closed when the next one comes."""
    for one in list(Path("/proc/self/fd").iterdir()):
        # Anything may be open, and may be closed meanwhile.
        with suppress(OSError):
            copy = os.dup(int(one.name))
            try:
                found = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with found:
                if found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX:
                    yield found
