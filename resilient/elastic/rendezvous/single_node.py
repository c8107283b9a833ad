"""The rendezvous of a node that meets nobody: there is nothing to wait for."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)


class SingleNodeRendezvous(RendezvousHandler):
    """What torch's agents ask where to meet, on one node.

    Torch's own waits up to 0.3 s in the first two rounds, so that many nodes do not come at
    once, and keeps a server and a thread for them.

    Args:
        run_id: of the job.
        address: of this node.
    """

    def __init__(self, run_id: str, address: str) -> None:
        self._run_id = run_id
        self._address = address
        self._is_closed = False

    @property
    def use_agent_store(self) -> bool:
        """Whether workers meet at a store of the agent's: they do, at that of the life."""
        return True

    def get_backend(self) -> str:
        """Return the name that torch's agents would show."""
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a group of this node, with a store that is new.

        Raises:
            RendezvousClosedError: it was closed.
        """
        if self._is_closed:
            raise RendezvousClosedError
        store = dist.HashStore()
        # The life says where its store is.
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, 0))

    def is_closed(self) -> bool:
        """Say whether it was closed."""
        return self._is_closed

    def set_closed(self) -> None:
        """Close it."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else comes."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close it."""
        self._is_closed = True
        return True
