"""Detection of joining, leaving and lost nodes and of a lost rendezvous, and the exit barrier.

At the exit barrier, nodes whose workers have finished wait for the other nodes.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from resilient.elastic.suspend_detection import SuspendDetector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from resilient.clock import Clock
    from resilient.distributed.stop_request import StopRequest
    from resilient.elastic.rendezvous.roster import Roster

_LEAVE_SECONDS = 5.0


class MembershipWatch:
    """Thread that polls the rendezvous, because a dead network blocks a query for a minute.

    Args:
        handler: Handler of the rendezvous; no other code may join while the watch runs.
        interval_seconds: Time between two queries.
        clock: Clock for the time of a loss.
        roster: Nodes of this attempt.

    Attributes:
        lost: Addresses of nodes that disappeared without a goodbye.
    """

    def __init__(
        self, handler: RendezvousHandler, interval_seconds: float, clock: Clock, roster: Roster
    ) -> None:
        self.lost_at_seconds: float | None = None
        self.is_changed = self.is_joined = False
        self.lost: list[str] = []
        self._roster = roster
        self._handler = handler
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._suspend_detector = SuspendDetector()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="membership", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for its current query."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Query now; after a suspension all absence times start again."""
        if self._suspend_detector.open(self._clock.monotonic_seconds()):
            self._roster.reset_absence_times()
        try:
            waiting_nodes = self._handler.num_nodes_waiting()
            self.is_joined = waiting_nodes > 0 and has_free_position(self._handler)
            self.lost = self._roster.lost(self._clock.monotonic_seconds())
            self.is_changed = (
                self.is_joined or bool(self.lost) or round_continued_without(self._handler)
            )
        except (RendezvousError, dist.DistError):
            if self.lost_at_seconds is None:
                self.lost_at_seconds = self._clock.monotonic_seconds()
        finally:
            self._suspend_detector.close(self._clock.monotonic_seconds())

    def look_uncached(self) -> None:
        """Query now, without torch's cached answer.

        A published message of another node counts too. That node stops its ranks to join again, and
        thereby the ranks of this node, but may not have reached the rendezvous yet.
        """
        discard_cached_state(self._handler)
        self.look()
        with suppress(dist.DistError):
            regrouping = self._roster.published_regrouping()
            self.is_changed = self.is_changed or bool(regrouping)
            self.is_joined = self.is_joined or regrouping == "joined"

    def publish_regrouping(self) -> None:
        """Report to the other nodes that this node stops its ranks because of a change."""
        self._roster.publish_regrouping(is_joined=self.is_joined)

    def report_silent_nodes(self) -> None:
        """Report the nodes that are gone, once the rendezvous is lost."""
        self._roster.report_silent_nodes()

    def leave_or_stay(self, request: StopRequest | None) -> int:
        """Return the number of nodes that continue without the leaving nodes; 0 if all leave.

        Args:
            request: Stop request to this node, which then publishes the request and leaves; None
                without one.
        """
        if request is None:
            return self._roster.stay()
        self._roster.publish_stop_request(is_for_all=request.is_for_all)
        return 0

    def ignore_change(self) -> None:
        """Ignore a change that does not affect this node, and continue to poll."""
        self.is_changed = False

    def left(self) -> list[int]:
        """Return the positions of nodes that have left this round; see :class:`Roster`."""
        return self._roster.left()

    def lost_for_seconds(self) -> float:
        """Return the time since the rendezvous stopped answering; 0 if it answers.

        The caller polls this method. A longer pause between calls counts as a suspension, in which
        the rendezvous could not answer.
        """
        if self.lost_at_seconds is None:
            return 0.0
        now_seconds = self._clock.monotonic_seconds()
        self._suspend_detector.open(now_seconds)
        return now_seconds - self._suspend_detector.shifted(self.lost_at_seconds)

    def _watch(self) -> None:
        while not self._stop_event.wait(self._interval_seconds):
            if not self.is_changed and self.lost_at_seconds is None:
                self.look()


def has_free_position(handler: RendezvousHandler) -> bool:
    """Return whether another node could join the next round, by the cached state.

    If there are more nodes than positions, torch leaves the last node waiting. A restart for that
    node would only leave another node waiting.
    """
    holder: Any = getattr(handler, "_state_holder", None)
    settings = getattr(handler, "settings", None)
    return not holder or not settings or len(holder.state.participants) < settings.max_nodes


def round_continued_without(handler: RendezvousHandler) -> bool:
    """Return whether the round of this node is over, by the cached state.

    Nodes wait only while another node is still in the round. The other nodes may leave the round,
    or treat this node as dead. Then no node waits and the next round may have begun, so a check for
    waiting nodes alone is not enough. The function reads the state of torch, because torch does not
    report this. A closed rendezvous has no next round.
    """
    # A static rendezvous has no rounds.
    holder: Any = getattr(handler, "_state_holder", None)
    if holder is None:
        return False
    state, node = holder.state, getattr(handler, "_this_node", None)
    return not state.closed and node not in state.participants


def discard_cached_state(handler: RendezvousHandler) -> None:
    """Make the handler query its store at the next call.

    torch answers from its cache for a second. Within that second another node can find a waiting
    node and stop its workers, and thereby all workers of this node.
    """
    holder: Any = getattr(handler, "_state_holder", None)
    if holder is not None:
        # The initial value of torch, before any query.
        holder._last_sync_time = -1  # noqa: SLF001


class ExitBarrier:
    """Exit barrier: nodes with finished workers wait for the other nodes.

    The barrier polls, so that a signal or a membership change ends the wait. It has two steps, so
    that the node that serves the store leaves last.

    Args:
        store: Store of this round of the rendezvous.
        node: Position of this node in the group.
        nodes: Number of nodes in the group.
        clock: Clock for the time limit.
        within_seconds: Longest wait for the other nodes.
    """

    def __init__(
        self, store: dist.Store, node: int, nodes: int, clock: Clock, within_seconds: float
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._node = node
        self._clock = clock
        self._within_seconds = within_seconds
        self._give_up_at_seconds: float | None = None
        self._leave_by_seconds: float | None = None

    def is_begun(self) -> bool:
        """Query once whether any node is done; a lost store counts as no."""
        try:
            return self._nodes > 1 and any(
                self._store.check([f"resilient/done/{node}"]) for node in range(self._nodes)
            )
        except dist.DistError:
            return False

    def is_passed(self) -> bool:
        """Query once whether all nodes are done; a lost store and a timeout count as yes."""
        if self._nodes == 1:
            return True
        now_seconds = self._clock.monotonic_seconds()
        try:
            if self._give_up_at_seconds is None:
                self._store.set(f"resilient/done/{self._node}", "1")
                self._give_up_at_seconds = now_seconds + self._within_seconds
            if self._leave_by_seconds is None:
                return self._all_done(now_seconds) or now_seconds > self._give_up_at_seconds
            return self._all_at("left") or now_seconds > self._leave_by_seconds
        except dist.DistError:
            return True

    def can_pass(self, left: Iterable[int]) -> bool:
        """Query once whether this node and all nodes in ``left`` are done, so that all can finish.

        While the result is True, a node must not withdraw its report that it is done. The other
        nodes rely on the report, leave, and close the rendezvous.
        """
        with suppress(dist.DistError):
            return self._store.check([f"resilient/done/{node}" for node in (self._node, *left)])
        return False

    def _all_done(self, now_seconds: float) -> bool:
        if not self._all_at("done"):
            return False
        self._store.set(f"resilient/left/{self._node}", "1")
        self._leave_by_seconds = now_seconds + _LEAVE_SECONDS
        return self._node != 0

    def _all_at(self, step: str) -> bool:
        return self._store.check([f"resilient/{step}/{node}" for node in range(self._nodes)])
