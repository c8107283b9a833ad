"""A node notices that the world went on without it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from resilient.agent.nodes.membership import MembershipWatch, went_on_without
from resilient.clock import SystemClock


class Board(RendezvousBackend):
    """What all nodes see, as a real backend keeps it: bytes, and a token for their version."""

    def __init__(self):
        self._state, self._token = None, 0

    @property
    def name(self):
        return "board"

    def get_state(self):
        return None if self._state is None else (self._state, self._token)

    def set_state(self, state, token=None):
        if token is not None and token != self._token:
            return (*self.get_state(), False)
        self._state, self._token = state, self._token + 1
        return self._state, self._token, True


def joined(board, nodes):
    """Return the handlers of nodes that joined one round."""
    serves = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A connection that waits holds whoever shares it.
    stores = [serves, *(TCPStore("127.0.0.1", serves.port) for _ in range(1, nodes))]
    timeout = RendezvousTimeout(last_call=timedelta(seconds=0.01))
    handlers = [
        DynamicRendezvousHandler.from_backend(
            "run", store, board, nodes, nodes + 1, "127.0.0.1", timeout
        )
        for store in stores
    ]
    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(lambda one: one.next_rendezvous(), handlers))
    return handlers


@pytest.fixture
def handlers(monkeypatch):
    # As the agent's own are: torch else keeps the address of its store for all rounds.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    started = joined(Board(), 2)
    for one in started:
        one._state_holder._cache_duration = 0  # seconds for which it would ask nobody
    yield started
    for one in started:
        one._stop_heartbeats()


def empties_the_round(handler):
    """Let a node take every silence for death, as after a long one, and write that down."""
    holder = handler._state_holder
    holder._settings = replace(holder._settings, keep_alive_interval=timedelta(0))
    for _ in ("find", "write"):
        holder.mark_dirty()
        handler.num_nodes_waiting()


def watch_of(handler):
    return MembershipWatch(handler, 1.0, SystemClock())


def test_a_round_that_everybody_holds_is_no_change(handlers):
    for handler in handlers:
        watch = watch_of(handler)
        watch.look()
        assert not watch.is_changed


def test_a_node_that_the_others_took_for_dead_joins_again(handlers):
    first, second = handlers
    empties_the_round(first)
    watch = watch_of(second)
    watch.look()
    assert second._state_holder.state.wait_list == set()
    assert watch.is_changed


def test_a_rendezvous_that_was_closed_has_no_next_round(handlers):
    first, second = handlers
    empties_the_round(first)
    first.set_closed()
    second.num_nodes_waiting()
    assert not went_on_without(second)
