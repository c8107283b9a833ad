"""Nodes wait for the one that serves the rendezvous as long as they were told to wait."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from resilient.elastic.rendezvous import connect
from tests.services.ports import held_port


@pytest.fixture
def port():
    with held_port() as held:
        yield held.getsockname()[1]


def wishes(port, **more):
    """Return those of a node that is not the first."""
    told = {"is_host": "false", "read_timeout": "1", **more}
    return RendezvousParameters("c10d", f"127.0.0.1:{port}", "run", 1, 2, **told)


@pytest.mark.slow
def test_a_first_node_that_comes_late_is_met(port, monkeypatch):
    stores = []

    def come(_):
        limit = timedelta(seconds=30)
        stores.append(TCPStore("127.0.0.1", port, is_master=True, timeout=limit))

    # It comes once the first question was given up.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=come)
    monkeypatch.setattr(connect, "time", clock)
    assert connect.connect(wishes(port, join_timeout="60")).get_backend() == "c10d"
    assert len(stores) == 1


def test_without_a_wish_a_first_node_has_the_time_of_a_question(port):
    with pytest.raises(RendezvousConnectionError):
        connect.connect(wishes(port))
