"""Watches for nodes that join, leave or are lost, and for the loss of the rendezvous itself."""

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
    """Asks the rendezvous in a thread, because a dead network holds the question for a minute.

    Args:
        handler: the rendezvous; nobody may join it while the watch is on.
        interval_seconds: between two questions.
        clock: dates the loss of the rendezvous.
        roster: who met for this life.

    Attributes:
        lost: addresses of nodes that went without a word.
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
        self._sight = SuspendDetector()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="membership", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more; waits for the question on its way."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Ask now; after a suspension nobody was missed for long."""
        if self._sight.open(self._clock.monotonic_seconds()):
            self._roster.forgive()
        try:
            waiting = self._handler.num_nodes_waiting()
            self.is_joined = waiting > 0 and has_room(self._handler)
            self.lost = self._roster.lost(self._clock.monotonic_seconds())
            self.is_changed = (
                self.is_joined or bool(self.lost) or round_continued_without(self._handler)
            )
        except (RendezvousError, dist.DistError):
            if self.lost_at_seconds is None:
                self.lost_at_seconds = self._clock.monotonic_seconds()
        finally:
            self._sight.close(self._clock.monotonic_seconds())

    def look_afresh(self) -> None:
        """Ask now, and take no answer for one that torch has kept since an earlier question.

        What another one has said counts as well: it stops its ranks to meet the others again, and
        ours with them, and may not have come to the rendezvous yet.
        """
        forget_what_was_heard(self._handler)
        self.look()
        with suppress(dist.DistError):
            heard = self._roster.heard_regrouping()
            self.is_changed = self.is_changed or bool(heard)
            self.is_joined = self.is_joined or heard == "joined"

    def tell(self) -> None:
        """Let the others know that this node's ranks are stopped because of a change."""
        self._roster.say_regrouping(is_joined=self.is_joined)

    def tell_silence(self) -> None:
        """Say who is gone now that the rendezvous is."""
        self._roster.tell_silence()

    def part(self, request: StopRequest | None) -> int:
        """Return how many nodes go on without those that were asked to leave, 0 if all leave.

        Args:
            request: to this node, which says so to the others and leaves; None if there was none.
        """
        if request is None:
            return self._roster.stay()
        self._roster.say_asked(is_for_all=request.is_for_all)
        return 0

    def overlook(self) -> None:
        """Take back that there was a change, because it matters to nobody here, and look again."""
        self.is_changed = False

    def left(self) -> list[int]:
        """Return the places of nodes that hold this life's round no more; see :class:`Roster`."""
        return self._roster.left()

    def lost_for_seconds(self) -> float:
        """Return how long ago the rendezvous stopped to answer, 0 when it answers.

        To be asked again and again: a longer time in between was none in which it could answer.
        """
        if self.lost_at_seconds is None:
            return 0.0
        now_seconds = self._clock.monotonic_seconds()
        self._sight.open(now_seconds)
        return now_seconds - self._sight.shifted(self.lost_at_seconds)

    def _watch(self) -> None:
        while not self._done.wait(self._interval_seconds):
            if not self.is_changed and self.lost_at_seconds is None:
                self.look()


def has_room(handler: RendezvousHandler) -> bool:
    """Say whether another node could join the next round, by what the handler last heard.

    When more come than there is room for, torch leaves the last one of them waiting for a round
    that has no place for it. To make way for that one would only leave another one waiting.
    """
    holder: Any = getattr(handler, "_state_holder", None)
    settings = getattr(handler, "settings", None)
    return not holder or not settings or len(holder.state.participants) < settings.max_nodes


def round_continued_without(handler: RendezvousHandler) -> bool:
    """Say whether the round that this node joined is over, by what the handler last heard.

    Nodes wait only as long as somebody holds the round. When the others have left it, or took
    this node for dead, nobody waits any more and the next round may have begun already: a node
    that asks for waiting nodes alone stays behind. Torch does not tell, so its state is read.
    A rendezvous that was closed has no next round.
    """
    # Static rendezvous have no rounds.
    holder: Any = getattr(handler, "_state_holder", None)
    if holder is None:
        return False
    state, node = holder.state, getattr(handler, "_this_node", None)
    return not state.closed and node not in state.participants


def forget_what_was_heard(handler: RendezvousHandler) -> None:
    """Have the handler ask its store the next time.

    Torch answers for a second with what it last heard. Within that another node can hear of one
    that waits, stop its workers, and with them all of ours.
    """
    holder: Any = getattr(handler, "_state_holder", None)
    if holder is not None:
        # Its own first value: it has asked nobody yet.
        holder._last_sync_time = -1  # noqa: SLF001


class ExitBarrier:
    """Where nodes whose workers are done wait for the others.

    Polled, so that a signal or a change of membership ends the wait; and in two steps, so that
    the node that serves the store leaves last.

    Args:
        store: of this round of the rendezvous.
        node: this node's place in the group.
        nodes: how many nodes the group has.
        clock: limits the waiting.
        within_seconds: how long to wait for the others at most.
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
        """Ask once whether any node is done; a lost store counts as no."""
        try:
            return self._nodes > 1 and any(
                self._store.check([f"resilient/done/{node}"]) for node in range(self._nodes)
            )
        except dist.DistError:
            return False

    def is_passed(self) -> bool:
        """Ask once whether every node is done; a lost store and a long wait count as yes."""
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
        """Ask once whether all nodes may yet be done: this one is, those that have ``left`` were.

        Who has said that it is done may not take that back as long as this holds: the others count
        on it, leave, and close the rendezvous behind them.
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
