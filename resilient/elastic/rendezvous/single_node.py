"""Rendezvous of a single node, without any wait."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)


class SingleNodeRendezvous(RendezvousHandler):
    """Rendezvous handler for one node.

    torch's own handler waits up to 0.3 s in the first two rounds, so that many nodes do not join at
    once. torch's handler also runs a server and a thread, which one node does not need.

    Args:
        run_id: Id of the job.
        address: Address of this node.
    """

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        self._address = address
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        """Always True, because workers use the store of the attempt, which the agent serves."""
        return True

    def get_backend(self) -> str:
        """Return the backend name that torch's agents show."""
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a group with this node only and a new store.

        Raises:
            RendezvousClosedError: The rendezvous was closed.
        """
        if self._is_closed:
            raise RendezvousClosedError
        store = dist.HashStore()
        # The attempt publishes the address of its store.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, 0))

    def is_closed(self) -> bool:
        """Return whether the rendezvous was closed."""
        return self._is_closed

    def set_closed(self) -> None:
        """Close the rendezvous."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0, because no other node joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the rendezvous."""
        self._is_closed = True
        return True
