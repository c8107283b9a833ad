"""The way to the node that serves the rendezvous, which may be late: a pod waits for a machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_PAUSE_SECONDS = 1.0


def connect(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return what the nodes meet through.

    Torch gives the node that serves it ``read_timeout`` to come up. Where somebody says
    ``join_timeout``, which is how long to wait for nodes, it is asked again until that is over.

    Raises:
        RendezvousError: nobody answered in time.
        ValueError: of a setting.
    """
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    patience_seconds = parameters.get_as_int("join_timeout", 0) or 0
    deadline_seconds = time.monotonic() + patience_seconds
    while True:
        try:
            return get_rendezvous_handler(parameters)
        except RendezvousConnectionError:
            if time.monotonic() + _PAUSE_SECONDS > deadline_seconds:
                raise
        time.sleep(_PAUSE_SECONDS)
