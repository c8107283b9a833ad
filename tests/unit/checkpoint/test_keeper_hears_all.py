"""What a rank told its keeper counts, though the rank is gone before the answer."""

from __future__ import annotations

import socket
import threading

import pytest

from resilient.checkpoint.daemon.memory import SharedMemoryPool
from resilient.checkpoint.daemon.server import SaverDaemon
from resilient.clock import SystemClock
from resilient.distributed.kv_store import JsonLineSocket, KVStoreServer
from resilient.storage.shared_memory import SharedFolder


class LateKeeper(SaverDaemon):
    """Answers the first question once it is let."""

    def __init__(self, *given):
        self.goes_on, self.heard, self.has_heard = threading.Event(), [], threading.Event()
        super().__init__(*given)

    def _answer(self, seat, asked):
        self.heard.append(asked["verb"])
        self.goes_on.wait(20)
        if len(self.heard) == 3:
            self.has_heard.set()
        return super()._answer(seat, asked)


@pytest.fixture
def keeper(tmp_path):
    folder = SharedFolder(tmp_path)
    board = KVStoreServer("127.0.0.1", "127.0.0.1")
    one = LateKeeper(tmp_path / "socket", SharedMemoryPool(folder), board, SystemClock())
    yield one
    one.close()
    folder.close()


def test_all_is_heard_that_was_told_before_the_end(keeper, tmp_path):
    rank = socket.socket(socket.AF_UNIX)
    rank.connect(str(tmp_path / "socket"))
    lines = JsonLineSocket(rank)
    for verb in ("begin", "save", "wait"):
        lines.send({"verb": verb})
    rank.close()
    keeper.goes_on.set()
    assert keeper.has_heard.wait(20), keeper.heard
    assert keeper.heard == ["begin", "save", "wait"]
