"""Waits of nodes that have met for a round and not started yet, where one may fall silent.

Between the meeting and the start nodes tell each other which ranks they have, and the first one
names the life. Torch waits for that in its store: it holds the connection which the heartbeats
need too, hears no signal meanwhile, and does so for a minute also where the other node is dead.
Here such waits ask again and again, and end with the member that they are for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.rendezvous import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.elastic.rendezvous import RendezvousHandler

_MUTE_SECONDS = 60.0
"""How long a member may say nothing although its heartbeats come."""
_POLL_SECONDS = 0.01
_POLL_SECONDS_MAX = 0.2


class MemberSilent(RendezvousError):
    """A member of a round went before the life of it could start: the others meet once more."""


class RoundStore:
    """The store of one round, by whose members alone it is known whether a wait makes sense.

    What is not a wait goes to the store itself.

    Args:
        inner: the store.
        handler: has just joined the round.

    Attributes:
        members: of the round, each with its place in it.
        round: its number.

    Raises:
        MemberSilent: some of those who met are gone already, by what this node has heard.
    """

    def __init__(self, inner: Any, handler: RendezvousHandler) -> None:
        self._inner = inner
        self._handler = handler
        state = _state_of(handler)
        self.round = state.round
        self.members: Mapping[Any, int] = dict(state.participants)
        _require_whole(self.members, handler)

    def __getattr__(self, name: str) -> Any:
        """Return what the store itself has."""
        return getattr(self._inner, name)

    def get(self, key: str) -> Any:
        """Return a value once it is there.

        Raises:
            MemberSilent: nobody will put it there.
            RendezvousError: the rendezvous does not answer.
        """
        self._wait([key])
        return self._inner.get(key)

    def multi_get(self, keys: Sequence[str]) -> Any:
        """Return values once all are there; see :meth:`get`."""
        self._wait(list(keys))
        return self._inner.multi_get(list(keys))

    def _wait(self, keys: list[str]) -> None:
        deadline_seconds = time.monotonic() + _MUTE_SECONDS
        pause_seconds = _POLL_SECONDS
        while not self._inner.check(keys):
            self._require_members()
            if time.monotonic() > deadline_seconds:
                raise MemberSilent(f"no member published {keys} within {_MUTE_SECONDS:g} s")
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _POLL_SECONDS_MAX)

    def _require_members(self) -> None:
        """Insist that all still hold the round, by what torch has heard within the last second."""
        self._handler.num_nodes_waiting()
        state = _state_of(self._handler)
        gone = [str(one.addr) for one in self.members if one not in state.participants]
        if gone or state.round != self.round:
            who = ", ".join(gone) or "all of them"
            raise MemberSilent(f"of those who met for a life some are gone before it began: {who}")


def _state_of(handler: Any) -> Any:
    return handler._state_holder.state  # noqa: SLF001 - no public way


def _require_whole(members: Mapping[Any, int], handler: Any) -> None:
    """Insist that nobody is missing in the places that were given out, and that enough are left.

    Torch drops a silent node from a round that is complete without counting anew: whoever looks
    then sees a world of fewer nodes than the others see, or than it may have.
    """
    nodes_min = handler.settings.min_nodes
    if sorted(members.values()) != list(range(len(members))) or len(members) < nodes_min:
        raise MemberSilent(
            f"a node fell silent while all met: {len(members)} are left, in the places "
            f"{sorted(members.values())}, and {nodes_min} are needed"
        )


def end_waits_with_members(handler: RendezvousHandler) -> RendezvousHandler:
    """Let waits for members of a round end when one is gone; return the handler.

    A static rendezvous knows no heartbeats, and is left alone.
    """
    store_of_round = getattr(handler, "_get_store", None)
    if store_of_round is not None and hasattr(handler, "_state_holder"):
        one: Any = handler
        one._get_store = lambda: RoundStore(store_of_round(), handler)  # noqa: SLF001 - see above
    return handler
