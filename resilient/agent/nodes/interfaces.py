"""Which network interface leads to the other nodes."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

from resilient.world.serving import address_toward

_SIOCGIFADDR = 0x8915  # netdevice(7)
_REQUEST_BYTES = 40
_ADDRESS = slice(20, 24)


def interface_for_gloo(host: str, port: int) -> str:
    """Return the interface that gloo must be told of to be reached from ``host``'s side.

    By itself gloo takes the address that this host's own name leads to. In many images that is
    the loopback, where no other node reaches it.

    Returns:
        Its name; empty where gloo finds the way by itself, or none is known.
    """
    if not _is_loopback(socket.gethostname()):
        return ""
    try:
        address = address_toward(host, port)
    except OSError:
        return ""
    return "" if address.startswith("127.") else _interface_of(address)


def _is_loopback(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(str(place[0]).startswith(("127.", "::1")) for *_, place in found)


def _interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name.encode())
            with suppress(OSError):  # one without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_ADDRESS]) == address:
                    return name
    return ""
