"""The agent's connections to the rendezvous, which torch opens and keeps to itself."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from resilient.world.serving import limit_silence


def limit_silence_toward(port: int, seconds: float) -> None:
    """Let calls to a store at ``port`` fail when its host vanishes without a word.

    Torch's store waits for an answer no longer than its timeout, then takes the question back
    and waits for the answer to that without end (2.13: ``TCPStore::doWait``).

    Args:
        port: of the store, on whichever host.
        seconds: of silence until the kernel ends a connection.
    """
    for one in list(Path("/proc/self/fd").iterdir()):
        # Anything may be open, and may be closed meanwhile.
        with suppress(OSError):
            copy = os.dup(int(one.name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with connection:
                _limit(connection, port, seconds)


def _limit(connection: socket.socket, port: int, seconds: float) -> None:
    is_tcp = connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX
    if is_tcp and connection.getpeername()[1] == port:
        limit_silence(connection, seconds)
