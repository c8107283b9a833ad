"""What must hold of several hosts whatever happens, looked at whenever something does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.elastic.events import RendezvousLost, RestartDecisionMade
from resilient.errors import Fenced, PeerFailed, Preempted

if TYPE_CHECKING:
    from resilient.events import Event
    from tests.simulation.hosts.host import Host, Process
    from tests.simulation.hosts.ranks import Rank, Together
    from tests.simulation.hosts.storm import HostStorm

_OUTLIVE_SECONDS = 45.0
"""How long an older world may still train: it does not hear that it is alone, then has a grace."""
_FRESH_SECONDS = 10.0


class HostWatcher:
    """Sees all, and writes down what must not be.

    Attributes:
        violations: in the order they were seen.
        is_stop_asked: whether any host was ever asked to stop.
        last_step: that any rank finished.
    """

    def __init__(self, storm: HostStorm) -> None:
        self.violations: list[str] = []
        self.is_stop_asked = False
        self.last_step = 0
        self._storm = storm
        self._stepped: dict[str, tuple[float, float]] = {}
        self._ended_well_seconds: float | None = None
        self._reactions: set[tuple[int, str, int]] = set()

    def started(self, rank: Rank) -> None:
        """Hold that a life is one world of a size that was asked for, and not of a done run."""
        life, plan = rank.together, self._storm.plan
        if rank.size != life.size or rank.rank >= life.size:
            self.tell(f"rank {rank.rank} of {rank.size} in a world of {life.size}")
        if rank.rank in life.ranks:
            self.tell(f"two hosts have rank {rank.rank} of one life")
        if not plan.nodes_min <= life.size <= plan.nodes_max:
            self.tell(f"a world of {life.size}, not {plan.nodes_min} to {plan.nodes_max}")
        if plan.is_external and not life.ranks and self._has_ended_well_for(rank.host):
            self.tell(f"{rank.host.name} starts again what has ended well")
        process = rank.host.process
        if process is not None:
            process.was_in = True

    def stepped(self, rank: Rank) -> None:
        """Hold that no older world trains for long beside a newer one, and none half."""
        life, now_seconds = rank.together, self._storm.loop.now_seconds
        is_first = self._storm.plan.is_external and life.attempt not in self._stepped
        if is_first and self._ended_well_seconds is not None:
            self.tell(f"{rank.host.name} trains again what has ended well")
        first_seconds, _ = self._stepped.get(life.attempt, (now_seconds, now_seconds))
        self._stepped[life.attempt] = first_seconds, now_seconds
        self.last_step = max(self.last_step, rank.step + 1)
        for other in self._storm.lives.values():
            began_seconds = self._stepped.get(other.attempt, (now_seconds, 0.0))[0]
            if other.number > life.number and now_seconds - began_seconds > _OUTLIVE_SECONDS:
                self.tell(f"life {life.number} still trains beside life {other.number}")

    def _has_ended_well_for(self, host: Host) -> bool:
        """Say whether a host could know of it: one that stood still does first what it was at."""
        if self._ended_well_seconds is None:
            return False
        thawed_seconds = host.thawed_seconds
        is_fresh = self._storm.loop.now_seconds - thawed_seconds < _FRESH_SECONDS
        return not is_fresh or thawed_seconds < self._ended_well_seconds

    def committed(self, rank: Rank, at: int) -> None:
        """Hold that a life commits with all its ranks, and nothing of an older one."""
        life = rank.together
        if len(life.ranks) != life.size:
            self.tell(f"step {at} was committed by {len(life.ranks)} of {life.size} ranks")

    def trains_with(self, size: int) -> bool:
        """Say whether the newest world has so many hosts, and gets on."""
        newest = max(self._storm.lives.values(), key=lambda one: one.number, default=None)
        if newest is None or newest.attempt not in self._stepped:
            return False
        age_seconds = self._storm.loop.now_seconds - self._stepped[newest.attempt][1]
        return newest.size == size and age_seconds < _FRESH_SECONDS and not _has_ended(newest)

    def told(self, process: Process, event: Event) -> None:
        """Hold that a host takes the blame for what happened on it, and once per life."""
        if not isinstance(event, RestartDecisionMade):
            return
        has_lost_peers_in_stop = event.ended == "stopped" and event.cause == "peer"
        is_struck = any(one.is_struck for host in self._storm.hosts for one in host.ranks[-1:])
        if has_lost_peers_in_stop and not is_struck and not self._is_excused(process):
            self.tell(f"{process.host.name} lost others in a stop, and nothing was out of reach")
        mine = process.host.ranks[-1:]
        is_own = event.ended == "failed" and event.cause not in ("", "peer")
        # Whoever cannot hear the others judges by what it sees alone.
        if is_own and mine and not mine[0].is_struck and not self._is_disturbed:
            self.tell(f"{process.host.name} blames itself with {event.cause}, and nothing hit it")

    def ended(self, process: Process) -> None:
        """Hold that an exit code is true."""
        code, storm = process.code, self._storm
        name = process.host.name
        if code == 0 and not storm.is_done:
            self.tell(f"{name} ended with 0 at step {storm.repository.step} of {storm.plan.steps}")
        if code == 0 and process.was_in and self._ended_well_seconds is None:
            self._ended_well_seconds = storm.loop.now_seconds
        is_alone = any(isinstance(one, RendezvousLost) for one in process.told)
        if code == Preempted.exit_code and not self.is_stop_asked and not is_alone:
            self.tell(f"{name} ended with 75, and nobody asked it to stop")
        if code == PeerFailed.exit_code and not self._is_excused(process):
            self.tell(f"{name} ended with 69, and nothing was out of reach")
        known = {0, PeerFailed.exit_code, Preempted.exit_code, Fenced.exit_code}
        if self.is_stop_asked:
            known |= {1, 137, 143}
        if code not in known:
            self.tell(f"{name} ended with {code}")

    def _is_excused(self, process: Process) -> bool:
        # Who serves the rendezvous takes it along; who waits for room has no part in a stop.
        reactions = [one for one in process.told if isinstance(one, RestartDecisionMade)]
        has_met_nobody = not reactions or reactions[-1].ended == "unreachable"
        is_left = has_met_nobody and self.is_stop_asked and not self._storm.is_done
        return self._is_disturbed or is_left or (self._storm.is_done and not process.was_in)

    @property
    def _is_disturbed(self) -> bool:
        """Whether anything could keep a host from the others."""
        words = ("dies", "cut", "slower", "still")
        return any(word in one for one in self._storm.strikes for word in words)

    def tell(self, what: str) -> None:
        """Write down what must not be."""
        self.violations.append(f"at {self._storm.loop.now_seconds:.1f} s: {what}")


def _has_ended(life: Together) -> bool:
    return any(one.status is not None for one in life.ranks.values())
