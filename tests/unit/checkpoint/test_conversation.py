"""How long a keeper may say nothing before it is given up."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from contextlib import suppress

import pytest

from resilient.checkpoint.daemon import connection as connection_module
from resilient.checkpoint.daemon.connection import DaemonConnection
from resilient.errors import PeerFailed


@pytest.fixture
def keeper(tmp_path):
    """Answer each line after so many seconds; returns the socket's path."""
    path, listeners = tmp_path / "keeper", []

    def start(seconds):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        listeners.append(listener)

        def serve():
            with listener.accept()[0] as connection:
                connection.recv(1 << 16)
                time.sleep(seconds)
                with suppress(OSError):
                    connection.sendall(json.dumps({"said": True}).encode() + b"\n")

        threading.Thread(target=serve, daemon=True).start()
        return str(path)

    yield start
    for one in listeners:
        one.close()


class Jumping:
    """A clock that lost an hour: the process was suspended in the middle of a look."""

    def __init__(self) -> None:
        self._jumps = itertools.chain([0.0, 3600.0], itertools.repeat(3600.0))

    def monotonic(self) -> float:
        return time.monotonic() + next(self._jumps)


def test_time_in_which_this_process_did_not_run_is_nobodys_silence(keeper, monkeypatch):
    talk = DaemonConnection(keeper(0.8))
    monkeypatch.setattr(connection_module, "time", Jumping())
    assert talk.request("wait") == {"said": True}
    talk.close()


def test_a_keeper_that_says_nothing_is_given_up(keeper, monkeypatch):
    monkeypatch.setattr(connection_module, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(connection_module, "_SILENCE_SECONDS_MIN", 0.5)
    talk = DaemonConnection(keeper(2))
    with pytest.raises(PeerFailed, match="the saver daemon has ended"):
        talk.request("wait")
    assert talk.is_silent


def test_a_look_waits_for_nothing_and_sees_a_keeper_that_is_gone(keeper):
    talk = DaemonConnection(keeper(0.5))
    talk.send("wait")
    began_seconds = time.monotonic()
    talk.require_alive()
    assert time.monotonic() - began_seconds < 0.4
    assert talk.receive() == {"said": True}
    time.sleep(0.2)
    with pytest.raises(PeerFailed, match="the connection was closed"):
        talk.require_alive()
    assert talk.is_closed
    assert not talk.is_silent
