"""A host whose own name leads nowhere meets the others like any other."""

from __future__ import annotations

import socket

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from resilient.distributed.kv_store import address_toward
from resilient.elastic.rendezvous import connect
from tests.services.ports import held_port

NOWHERE = "no-such-host.invalid"


@pytest.fixture
def unnamed(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: NOWHERE)


@pytest.fixture
def port():
    with held_port() as held:
        return held.getsockname()[1]


@pytest.fixture
def address():
    """Return one of this host that is not its loopback's: of that torch asks no name."""
    try:
        return address_toward("192.0.2.1", 1)
    except OSError:
        pytest.skip("this host has no way to others")


def test_it_serves_a_rendezvous_at_an_address_of_its_own(unnamed, address, port):
    parameters = RendezvousParameters("c10d", f"{address}:{port}", "run", 1, 1, read_timeout="5")
    handler = connect.connect(parameters)
    assert handler.next_rendezvous().bootstrap_store_info.master_addr == address
    assert handler.shutdown()


def test_it_does_not_serve_one_that_is_elsewhere(unnamed):
    # TEST-NET-1 (RFC 5737) is nobody's.
    parameters = RendezvousParameters("c10d", "192.0.2.1:29400", "run", 1, 1)
    assert connect.with_own_address(parameters).config["is_host"] == "false"
    assert connect.with_own_address(parameters).local_addr != NOWHERE


def test_what_a_person_says_is_believed(unnamed):
    told = {"local_addr": "192.0.2.7", "is_host": "false"}
    parameters = RendezvousParameters("c10d", "127.0.0.1:29400", "run", 1, 1, **told)
    found = connect.with_own_address(parameters)
    assert (found.local_addr, found.config["is_host"]) == ("192.0.2.7", "false")


def test_torch_decides_where_the_name_leads_somewhere(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    parameters = RendezvousParameters("c10d", "127.0.0.1:29400", "run", 1, 1)
    assert connect.with_own_address(parameters) is parameters
