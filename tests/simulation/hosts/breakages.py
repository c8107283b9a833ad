"""Deliberate defects of how hosts meet, watch each other and end; each must be found."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from resilient.elastic.attempt_monitor import AttemptMonitor
from resilient.elastic.rendezvous import connect, leave, membership
from resilient.elastic.rendezvous.membership import ExitBarrier, MembershipWatch
from resilient.elastic.rendezvous.remote_hangs import PeerHangExchange
from resilient.elastic.rendezvous.roster import Roster

if TYPE_CHECKING:
    from collections.abc import Iterator


def _any_room(_handler: Any) -> bool:
    """Call everybody back for a host that is one too many."""
    return True


def _never(*_: Any) -> bool:
    return False


def _always(*_: Any) -> bool:
    return True


def _unsaid(*_: Any, **__: Any) -> None:
    """Stop ranks without a word to the others."""


def _time_of_day(handler: Any) -> Any:
    """Believe the clocks of others, as torch does."""
    return handler


HOST_BREAKAGES: dict[str, tuple[Any, str, Any]] = {
    "room": (membership, "has_free_position", _any_room),
    "goodbye": (Roster, "waits_for_leaving_nodes", _never),
    "done": (AttemptMonitor, "_report_done_and_wait", _unsaid),
    "clocks": (connect, "use_local_clock", _time_of_day),
    "blame": (PeerHangExchange, "has_culprit", _never),
    "spare": (leave, "_has_succeeded", _never),
    "heard": (Roster, "has_waiting_nodes", _never),
    "barrier": (ExitBarrier, "is_passed", _always),
    "look": (MembershipWatch, "look", _unsaid),
}
"""What is broken."""

FOUND = {
    "room": (43, "hosts are not let in, or nobody goes on"),
    "goodbye": (108, "lost others in a stop, and nothing was out of reach"),
    "done": (2352, "ended with 69, and nothing was out of reach"),
    "clocks": (0, "ended with 69, and nothing was out of reach"),
    "blame": (0, "blames itself with hang, and nothing hit it"),
    "spare": (13, "ended with 69, and nothing was out of reach"),
    "heard": (337, "ended with 69, and nothing was out of reach"),
    "barrier": (4, "ended with 69, and nothing was out of reach"),
    "look": (51, "ended with 69, and nothing was out of reach"),
}
"""The first seed that finds each, counted from 0, and what it then says."""


@contextmanager
def broken_hosts(name: str) -> Iterator[None]:
    """Have the library broken in one way inside; an empty name leaves it as it is."""
    if not name:
        yield
        return
    place, attribute, defect = HOST_BREAKAGES[name]
    before = getattr(place, attribute)
    setattr(place, attribute, defect)
    try:
        yield
    finally:
        setattr(place, attribute, before)
