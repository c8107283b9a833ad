"""Status exchange between agents to distinguish a local hang from a hang on another host.

An agent manages the ranks of one host. Each agent writes one small record about its ranks to the
rendezvous store. The agent reads the other records only while its own ranks seem to hang. A thread
with its own connection writes and reads the records, because a dead network blocks a query for a
minute. The exchange does not wait for an agent that writes nothing for a few seconds.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from resilient.elastic.hang_detection import find_culprit, parse_host_status
from resilient.events import Event, Level

if TYPE_CHECKING:
    from resilient.clock import Clock
    from resilient.elastic.hang_detection import Hang, HostHangStatus
    from resilient.events import Emitter

_EXCHANGE_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
_ACT_SECONDS = 20.0
"""Time for the other agent to wait for answers, dump stacks, kill, and join the rendezvous."""
_LEAVE_SECONDS = 1.0
# Ranks in these states wait for no other rank, so no answer is needed.
_SURE_STATES = ("T", "D")


@dataclass(frozen=True, slots=True)
class RemoteHangReported(Event):
    """The ranks of this host wait for a rank of another host, whose agent ends the hang.

    Attributes:
        rank: Rank that is behind or stopped.
        step: Last step that the rank finished, -1 before the first.
        waiting: Overdue rank of this host.
    """

    level: ClassVar[Level] = Level.INFO
    template: ClassVar[str] = (
        "rank {waiting} makes no progress because it waits for rank {rank} of another host: the "
        "agent of that host handles the hang"
    )
    rank: int
    step: int
    waiting: int


@dataclass(frozen=True, slots=True)
class RemoteRankLost(Event):
    """The ranks of this host ended and only report the loss of a rank of another host.

    Attributes:
        rank: Rank of this host that first reported the loss.
        status: Exit code of the rank, or minus the number of the signal.
        error: Error that the rank reported.
    """

    level: ClassVar[Level] = Level.INFO
    template: ClassVar[str] = (
        "rank {rank} lost a rank of another host, which is not a failure of this host: the hosts "
        "join the rendezvous again. Its error: {error}"
    )
    rank: int
    status: int
    error: str


class PeerHangExchange:
    """Comparison of this host's ranks with those of the other hosts of the attempt.

    Args:
        store: Store of this round, which the exchange clones so that it blocks no other caller.
        node: Position of this node in the group.
        nodes: Number of nodes in the group.
        attempt: Name of the attempt.
        clock: Clock for the time limits.
        emit: Listener for a blamed host.
    """

    def __init__(
        self, store: Any, node: int, nodes: int, attempt: str, clock: Clock, emit: Emitter
    ) -> None:
        self._store = store
        self._key = f"resilient/standing/{attempt}"
        self._node = node
        self._peers = [number for number in range(nodes) if number != node]
        self._published: list[int] = []
        self._clock = clock
        self._emit = emit
        self._status: HostHangStatus | None = None
        self._number = 0
        self._place: tuple[int, int, int] | None = None
        self._asked_at_seconds = 0.0
        self._accused_at_seconds: float | None = None
        self._peer_statuses: dict[int, tuple[int, HostHangStatus, float | None]] = {}
        self._is_asking = False
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._exchange, name="standings", daemon=True)

    @property
    def is_to_blame(self) -> bool:
        """True if another host is to blame, by the last records."""
        return self._accused_at_seconds is not None

    def start(self) -> None:
        """Start the exchange, if there are other hosts."""
        if self._peers:
            self._thread.start()

    def stop(self) -> None:
        """Stop the exchange without waiting for a blocked query."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_SECONDS)

    def publish(self, own_status: HostHangStatus | None) -> None:
        """Publish the status of this host's ranks, without a query to the other hosts.

        An overdue status is not updated, so that all hosts compare the same values.
        """
        status = self._status
        is_known = (
            status is not None
            and status.is_overdue
            and own_status is not None
            and own_status.is_overdue
        )
        if not (
            is_known
            and status is not None
            and own_status is not None
            and status.place == own_status.place
        ):
            self._status = own_status
        if own_status is None or not own_status.is_overdue:
            self._is_asking, self._accused_at_seconds = False, None

    def has_culprit(self, hang: Hang) -> bool:
        """Return whether to wait for the records of other hosts, or for the blamed host to act.

        Args:
            hang: Hang of this host's ranks; call again while the hang lasts.
        """
        own_status, first_rank, now_seconds = (
            self._status,
            hang.first,
            self._clock.monotonic_seconds(),
        )
        if (
            not self._peers
            or own_status is None
            or first_rank.stage_name
            or first_rank.state in _SURE_STATES
        ):
            return False
        if own_status.place != self._place or not self._is_asking:
            self._place, self._asked_at_seconds = own_status.place, now_seconds
            self._peer_statuses, self._accused_at_seconds, self._is_asking = {}, None, True
        statuses = self._current_statuses(now_seconds)
        waited_seconds = now_seconds - self._asked_at_seconds
        culprit, is_missing = find_culprit(own_status, statuses), len(statuses) < len(self._peers)
        if culprit is None and is_missing and self._accused_at_seconds is not None:
            # The blamed host is silent because it acts. If it stays silent too long, it does not
            # act.
            return now_seconds - self._accused_at_seconds < _ACT_SECONDS
        if is_missing and waited_seconds < _ANSWER_SECONDS:
            return True
        return self._is_waited_for(culprit, own_status, now_seconds)

    def _is_waited_for(
        self, culprit: HostHangStatus | None, own_status: HostHangStatus, now_seconds: float
    ) -> bool:
        """Return whether a rank elsewhere is to blame and its agent still has time to act."""
        if culprit is None:
            self._accused_at_seconds = None
            return False
        if self._accused_at_seconds is None:
            self._emit(RemoteHangReported(culprit.rank, culprit.step, own_status.rank))
        if self._accused_at_seconds is None or not culprit.is_overdue:
            self._accused_at_seconds = now_seconds
        return now_seconds - self._accused_at_seconds < _ACT_SECONDS

    def _current_statuses(self, now_seconds: float) -> list[HostHangStatus]:
        """Return the records that were rewritten since the query began, and not long ago."""
        return [
            status
            for _, status, at_seconds in [*self._peer_statuses.values()]
            if at_seconds is not None and now_seconds - at_seconds < _ANSWER_SECONDS
        ]

    def _exchange(self) -> None:
        store = None
        while not self._stop_event.wait(_EXCHANGE_SECONDS):
            with suppress(dist.DistError):
                store = store or self._store.clone()
                self._write_own_status(store)
                if self._is_asking:
                    self._read_peers(store)

    def _write_own_status(self, store: Any) -> None:
        own_status = self._status
        if own_status is not None:
            self._number += 1
            store.set(f"{self._key}/{self._node}", own_status.dump(self._number))

    def _read_peers(self, store: Any) -> None:
        """Read the records of the other hosts; the age of records already present is unknown.

        The read is one query once all hosts have written. Each query is a round trip, and on a
        lossy network many slow round trips would delay this host's own heartbeats.
        """
        statuses = self._peer_statuses
        self._published += [
            peer
            for peer in self._peers
            if peer not in self._published and store.check([f"{self._key}/{peer}"])
        ]
        keys = [f"{self._key}/{node}" for node in self._published]
        texts = store.multi_get(keys) if keys else []
        for node, text in zip(self._published, texts, strict=True):
            with suppress(ValueError):
                number, status = parse_host_status(text.decode())
                last_number, _, at_seconds = statuses.get(node, (number, status, None))
                if number != last_number:
                    at_seconds = self._clock.monotonic_seconds()
                statuses[node] = number, status, at_seconds
