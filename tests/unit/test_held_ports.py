"""The ports that tests give to servers: nobody's connection takes one before its server does."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from tests.services.ports import held_ports

MANY = 40


def test_a_server_listens_at_a_held_port_and_again_when_the_first_has_gone():
    with held_ports(1) as (port,):
        for _ in range(2):
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            store.set("a", "b")
            assert store.get("a") == b"b"
            del store


def test_nobody_is_given_a_held_port():
    with held_ports(MANY) as ports, ExitStack() as stack:
        assert len(set(ports)) == MANY
        for port in ports:
            other = stack.enter_context(socket.socket())
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
