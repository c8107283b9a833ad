"""Whether a hang is another host's: the agents of a life tell each other how their ranks stand.

Each keeps one small record in the store of the round, and reads those of the others only while
its own ranks seem to hang. All of it is done in a thread with a connection of its own, because a
dead network holds a question for a minute; whoever says nothing for a few seconds is not waited
for.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from resilient.elastic.hang_detection import find_culprit, parse_standing
from resilient.events import Event, Level

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.elastic.hang_detection import Hang, HostHangStatus
    from resilient.events import Emitter

_EXCHANGE_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
_ACT_SECONDS = 20.0
"""The other agent waits for answers too, takes stacks, kills, and comes to the rendezvous."""
_LEAVE_SECONDS = 1.0
# No rank of these waits for another one: nobody else need be heard.
_SURE_STATES = ("T", "D")


@dataclass(frozen=True, slots=True)
class RemoteHangReported(Event):
    """The ranks of this host wait for one of another host, whose agent will end that.

    Attributes:
        rank: that is behind, or stopped.
        step: the last that it finished, -1 before the first.
        waiting: the rank of this host that is overdue.
    """

    level: ClassVar[Level] = Level.INFO
    rank: int
    step: int
    waiting: int

    def line(self) -> str:
        """Say who waits for whom."""
        return (
            f"rank {self.waiting} makes no progress because it waits for rank {self.rank} of "
            "another host: that one's agent looks after it"
        )


@dataclass(frozen=True, slots=True)
class RemoteRankLost(Event):
    """The ranks of this host ended, and tell of nothing but the loss of one of another host.

    Attributes:
        rank: of this host that told of it first.
        status: how it ended: exit code, or minus the signal's number.
        error: in its words.
    """

    level: ClassVar[Level] = Level.INFO
    rank: int
    status: int
    error: str

    def line(self) -> str:
        """Say who lost whom, as far as that is known here."""
        return (
            f"rank {self.rank} lost a rank of another host, which is no failure of this host: the "
            f"hosts meet again. It said: {self.error}"
        )


class PeerHangExchange:
    """Compares the ranks of this host with those of the others of its life.

    Args:
        store: of this round of the rendezvous; it is cloned, so that nobody waits for this one.
        node: this node's place in the group.
        nodes: how many nodes the group has.
        attempt: the name of the life.
        clock: limits the waiting.
        emit: where it is told that another host is to blame.
    """

    def __init__(
        self, store: Any, node: int, nodes: int, attempt: str, clock: Clock, emit: Emitter
    ) -> None:
        self._store = store
        self._key = f"resilient/standing/{attempt}"
        self._node = node
        self._others = [one for one in range(nodes) if one != node]
        self._written: list[int] = []
        self._clock = clock
        self._emit = emit
        self._own: HostHangStatus | None = None
        self._number = 0
        self._place: tuple[int, int, int] | None = None
        self._asked_at_seconds = 0.0
        self._accused_at_seconds: float | None = None
        self._heard: dict[int, tuple[int, HostHangStatus, float | None]] = {}
        self._is_asking = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="standings", daemon=True)

    @property
    def is_to_blame(self) -> bool:
        """Whether another host is, by what was heard last."""
        return self._accused_at_seconds is not None

    def start(self) -> None:
        """Begin to tell and to listen, if there is anybody."""
        if self._others:
            self._thread.start()

    def stop(self) -> None:
        """Do so no more; a question that hangs is left alone."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_SECONDS)

    def tell(self, own: HostHangStatus | None) -> None:
        """Have the others know how the ranks of this host stand; they are not asked here.

        What is overdue stays as it was first seen, so that all hosts compare the same.
        """
        told = self._own
        is_known = told is not None and told.is_overdue and own is not None and own.is_overdue
        if not (is_known and told is not None and own is not None and told.place == own.place):
            self._own = own
        if own is None or not own.is_overdue:
            self._is_asking, self._accused_at_seconds = False, None

    def has_culprit(self, hang: Hang) -> bool:
        """Say whether to wait: for what others say, or for the one of them that is to blame.

        Args:
            hang: of this host's ranks; asked again and again while it lasts.
        """
        own, first, now_seconds = self._own, hang.first, self._clock.monotonic_seconds()
        if not self._others or own is None or first.edge or first.state in _SURE_STATES:
            return False
        if own.place != self._place or not self._is_asking:
            self._place, self._asked_at_seconds = own.place, now_seconds
            self._heard, self._accused_at_seconds, self._is_asking = {}, None, True
        heard = self._fresh(now_seconds)
        waited_seconds = now_seconds - self._asked_at_seconds
        culprit, is_missing = find_culprit(own, heard), len(heard) < len(self._others)
        if culprit is None and is_missing and self._accused_at_seconds is not None:
            # It says no more because it acts; if it does not for long, nobody will.
            return now_seconds - self._accused_at_seconds < _ACT_SECONDS
        if is_missing and waited_seconds < _ANSWER_SECONDS:
            return True
        return self._is_waited_for(culprit, own, now_seconds)

    def _is_waited_for(
        self, culprit: HostHangStatus | None, own: HostHangStatus, now_seconds: float
    ) -> bool:
        """Say whether there is one to blame elsewhere, and its agent still has time to act."""
        if culprit is None:
            self._accused_at_seconds = None
            return False
        if self._accused_at_seconds is None:
            self._emit(RemoteHangReported(culprit.rank, culprit.step, own.rank))
        if self._accused_at_seconds is None or not culprit.is_overdue:
            self._accused_at_seconds = now_seconds
        return now_seconds - self._accused_at_seconds < _ACT_SECONDS

    def _fresh(self, now_seconds: float) -> list[HostHangStatus]:
        """Return what was written anew since it was asked for, and not long ago."""
        return [
            standing
            for _, standing, at_seconds in [*self._heard.values()]
            if at_seconds is not None and now_seconds - at_seconds < _ANSWER_SECONDS
        ]

    def _exchange(self) -> None:
        store = None
        while not self._done.wait(_EXCHANGE_SECONDS):
            with suppress(dist.DistError):
                store = store or self._store.clone()
                self._post(store)
                if self._is_asking:
                    self._listen(store)

    def _post(self, store: Any) -> None:
        own = self._own
        if own is not None:
            self._number += 1
            store.set(f"{self._key}/{self._node}", own.dump(self._number))

    def _listen(self, store: Any) -> None:
        """Read what the others wrote; of what stands there already nobody knows how old it is.

        It is one question once all have written: each is a way to the store and back, and a lossy
        network that slows down many of them keeps this host from being heard itself.
        """
        heard = self._heard
        self._written += [
            one
            for one in self._others
            if one not in self._written and store.check([f"{self._key}/{one}"])
        ]
        keys = [f"{self._key}/{node}" for node in self._written]
        texts = store.multi_get(keys) if keys else []
        for node, text in zip(self._written, texts, strict=True):
            with suppress(ValueError):
                number, standing = parse_standing(text.decode())
                known, _, at_seconds = heard.get(node, (number, standing, None))
                if number != known:
                    at_seconds = self._clock.monotonic_seconds()
                heard[node] = number, standing, at_seconds
