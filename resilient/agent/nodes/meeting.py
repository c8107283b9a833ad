"""The way to the node that serves the rendezvous, which may be late, and may be lost and come back.

A pod waits for a machine; so does the one that takes its place.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from resilient.agent.nodes.names import told_where
from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

    from resilient.events import Emitter

_PAUSE_SECONDS = 1.0
_JOIN_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class MeetingAgain(Event):
    """The node that serves the rendezvous was lost while this one met the others there.

    Attributes:
        patience_seconds: how long there is for another node to serve it.
    """

    level: ClassVar[Level] = Level.WARNING
    patience_seconds: float

    def line(self) -> str:
        """Say that this node waits."""
        return (
            "the node that serves the rendezvous is gone: waiting up to "
            f"{self.patience_seconds:.0f} s for it to come back"
        )


@dataclass(frozen=True, slots=True)
class MeetingBroken(Event):
    """A node that had met the others was gone before their life began.

    Attributes:
        reason: who, as far as that is known.
    """

    level: ClassVar[Level] = Level.WARNING
    reason: str

    def line(self) -> str:
        """Say what follows."""
        return f"meeting the other nodes once more: {self.reason}"


@dataclass(frozen=True, slots=True)
class Comeback:
    """Lets a node meet the others again after the one that serves the rendezvous was lost.

    Without a wish for it, as by default, it leaves that to whoever starts nodes.

    Attributes:
        connect: opens a new way to whoever serves the rendezvous now.
        patience_seconds: from the first loss on; 0 not to try.
    """

    connect: Callable[[], RendezvousHandler] | None = None
    patience_seconds: float = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether a node waits rather than leaves."""
        return self.connect is not None and self.patience_seconds > 0

    def meet(self, spec: Any, join: Callable[[], None], emit: Emitter) -> None:
        """Join the others, each time through a new connection, until that was not interrupted.

        Where one of them falls silent before their life has begun the rest meet again, for as long
        as the rendezvous lets nodes wait for others. Dying inside leaves nothing behind: the
        others miss this node's heartbeats.

        Args:
            spec: torch's description of the group, whose handler is replaced.
            join: meets through that handler.
            emit: where each loss is told.

        Raises:
            RendezvousError: of the meeting itself, or nobody served it in time.
            MemberSilent: time and again somebody fell silent.
            dist.DistError: the rendezvous did not answer.
            PeerFailed: nobody answered in time.
        """
        # Here, so that a plan and the first signals need no torch.
        import torch.distributed as dist
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError

        from resilient.agent.nodes.silence import MemberSilent

        began_seconds = time.monotonic()
        deadline_seconds = began_seconds + self.patience_seconds
        while True:
            try:
                return join()
            except MemberSilent as error:
                if time.monotonic() - began_seconds > _join_seconds(spec.rdzv_handler):
                    raise
                emit(MeetingBroken(str(error)))
                continue
            except (RendezvousConnectionError, dist.DistError) as error:
                left_seconds = deadline_seconds - time.monotonic() - _PAUSE_SECONDS
                if self.connect is None or left_seconds <= 0:
                    raise
                is_gone = isinstance(error, RendezvousConnectionError)
            time.sleep(_PAUSE_SECONDS)
            # A node that had joined leaves before it joins again; one that cannot finds out so.
            if is_gone:
                emit(MeetingAgain(left_seconds))
                spec.rdzv_handler = self.connect()


def _join_seconds(handler: Any) -> float:
    """Return how long nodes wait for others at a rendezvous."""
    settings = getattr(handler, "settings", None)
    return settings.timeout.join.total_seconds() if settings else _JOIN_SECONDS


NO_COMEBACK = Comeback()


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

    from resilient.agent.nodes.clocks import judge_by_sight
    from resilient.agent.nodes.silence import end_waits_with_members

    patience_seconds = parameters.get_as_int("join_timeout", 0) or 0
    deadline_seconds = time.monotonic() + patience_seconds
    while True:
        try:
            handler = judge_by_sight(get_rendezvous_handler(told_where(parameters)))
            return end_waits_with_members(handler)
        except RendezvousConnectionError:
            if time.monotonic() + _PAUSE_SECONDS > deadline_seconds:
                raise
        time.sleep(_PAUSE_SECONDS)
