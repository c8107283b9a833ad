"""What torch asks this host's own name for, found out without it: in many images it has none."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from resilient.world.serving import address_toward

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

_DEFAULT_PORT = 29400


def told_where(parameters: RendezvousParameters) -> RendezvousParameters:
    """Return these, with who serves the rendezvous and this node's address if torch would not know.

    Torch 2.13 asks where this host's own name leads, and raises where that is nowhere
    (``_matches_machine_hostname``); the others would be told that name.

    Raises:
        ValueError: of the endpoint.
    """
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if parameters.backend != "c10d" or leads_somewhere(socket.gethostname()):
        return parameters
    host, port = parse_rendezvous_endpoint(parameters.endpoint, _DEFAULT_PORT)
    told = {"is_host": str(is_here(host)).lower(), **parameters.config}
    return RendezvousParameters(
        parameters.backend,
        parameters.endpoint,
        parameters.run_id,
        parameters.min_nodes,
        parameters.max_nodes,
        local_addr=parameters.local_addr or _own_address(host, port),
        **told,
    )


def leads_somewhere(name: str) -> bool:
    """Return whether a name has an address."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except OSError:
        return False


def is_here(host: str) -> bool:
    """Return whether a name or an address is this host's: whether it can be listened at."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_own(family, place) for family, _, _, _, place in found)


def _is_own(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((place[0], 0, *place[2:]))
        except OSError:
            return False
    return True


def _own_address(host: str, port: int) -> str | None:
    try:
        return address_toward(host, port)
    except OSError:
        return None
