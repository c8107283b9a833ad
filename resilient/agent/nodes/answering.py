"""Which hosts answer, and where they are; each is asked for a moment only."""

from __future__ import annotations

import socket
import threading
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

_ANSWER_SECONDS = 1.0
# A host may have several addresses, and its name has to be resolved.
_ASKED_SECONDS = 3.0
_PROBED_AT_ONCE_MAX = 32
# tcpmux: whoever is there refuses it, or even accepts.
_PROBED_PORT = 1


def who_answers(addresses: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return which hosts are there, so only their agents have gone, and which do not answer.

    A host that a firewall hides looks like one that is gone.
    """
    answers = _asked(_answers, addresses, otherwise=lambda _: False)
    found = sorted(answers)
    return [one for one in found if answers[one]], [one for one in found if not answers[one]]


def _asked(
    question: Callable[[str], T], hosts: Iterable[str], otherwise: Callable[[str], T]
) -> dict[str, T]:
    """Ask something of hosts at once, and return what is known by the deadline of each.

    Args:
        question: may be held by a resolver that does not answer, which nothing can interrupt.
        hosts: names or addresses.
        otherwise: the answer for one of whom nothing is known in time.
    """

    def ask(host: str) -> T:
        told: list[T] = []
        thread = threading.Thread(
            target=lambda: told.append(question(host)), name="ask-host", daemon=True
        )
        thread.start()
        thread.join(_ASKED_SECONDS)
        return told[0] if told else otherwise(host)

    found = sorted(set(hosts))
    if not found:
        return {}
    with ThreadPool(min(len(found), _PROBED_AT_ONCE_MAX)) as pool:
        return dict(zip(found, pool.map(ask, found), strict=True))


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, _PROBED_PORT), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def addresses_of(hosts: Iterable[str]) -> dict[str, set[str]]:
    """Return the addresses of hosts; the name of one that none is known of."""
    return _asked(_resolved, hosts, otherwise=lambda one: {one} - {""})


def _resolved(host: str) -> set[str]:
    if not host:
        return set()
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}
