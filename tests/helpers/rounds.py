"""Handlers of torch's rendezvous that joined one round, over a state in memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)


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


def connect_all(kv_store, nodes, nodes_max):
    """Return the handlers of nodes that have not met yet."""
    serves = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A connection that waits holds whoever shares it.
    stores = [serves, *(TCPStore("127.0.0.1", serves.port) for _ in range(1, nodes))]
    timeout = RendezvousTimeout(last_call=timedelta(seconds=0.01))
    handlers = [
        DynamicRendezvousHandler.from_backend(
            "run", store, kv_store, nodes, nodes_max, "127.0.0.1", timeout
        )
        for store in stores
    ]
    for handler in handlers:
        handler._state_holder._cache_duration = 0  # seconds for which it would ask nobody
    return handlers


def meet(handlers):
    """Let all join one round; return what each is told of it."""
    with _brisk(), ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda handler: handler.next_rendezvous(), handlers))


@contextmanager
def _brisk():
    """Have torch ask again after a moment instead of a second."""
    before = dynamic_rendezvous._delay
    dynamic_rendezvous._delay = lambda seconds: time.sleep(0.01)
    try:
        yield
    finally:
        dynamic_rendezvous._delay = before


def join_all(kv_store, nodes, nodes_max=None):
    """Return the handlers of nodes that joined one round."""
    handlers = connect_all(kv_store, nodes, nodes_max or nodes + 1)
    meet(handlers)
    return handlers


def dies(handler):
    """Take the other node for dead, as ``handler`` does when its heartbeats stop."""
    state = handler._state_holder.state
    (other_node,) = set(state.participants) - {handler._this_node}
    del state.participants[other_node], state.last_heartbeats[other_node]
