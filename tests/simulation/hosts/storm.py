"""A seed's world of several hosts: what it is like, what strikes it, and whether it comes out."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.hosts.clockwork import Datetime, HostLoop, Threading, Time
from tests.simulation.hosts.driving import driven
from tests.simulation.hosts.host import Host
from tests.simulation.hosts.network import Network, Place
from tests.simulation.hosts.ranks import Repository
from tests.simulation.hosts.watcher import HostWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.elastic.worker_errors import WorkerError
    from tests.simulation.hosts.ranks import Rank, Together

_STORM_SECONDS = 60.0
_ENDLESS = 1_000_000
_ADMIT_SECONDS = 150.0
"""From calm until all hosts train: heartbeats, a meeting that was under way, and starts."""
_END_SECONDS = 300.0
_ROUND_SECONDS = 4.0


@dataclass
class Plan:
    """What the job is.

    Attributes:
        steps: until it is done; may be set while it runs.
        every: how many steps to a save.
        waits_for_comeback: whether agents wait for a rendezvous that was lost.
    """

    hosts: int
    nodes_min: int
    nodes_max: int
    steps: int
    every: int
    step_seconds: float
    is_external: bool
    waits_for_comeback: bool


@dataclass(frozen=True, slots=True)
class HostVerdict:
    """What came of a seed."""

    seed: int
    violations: tuple[str, ...]
    strikes: tuple[str, ...]
    lives: int
    sizes: tuple[int, ...]
    codes: tuple[int | None, ...]
    switches: int
    virtual_seconds: float


class HostStorm:
    """Some hosts, their agents, and what happens to them.

    Args:
        seed: decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = draw = Random(seed)
        self.loop = HostLoop(draw)
        self.time, self.day, self.threads = (
            kind(self.loop) for kind in (Time, Datetime, Threading)
        )
        self.network = Network(self.loop, draw.choice((0.0, 0.0, 0.02)))
        self.plan = _plan(draw)
        self.place: Place | None = Place(self.loop, None) if self.plan.is_external else None
        self.repository = Repository()
        self.boards: dict[tuple[str, int], Place] = {}
        self.lives: dict[str, Together] = {}
        self.ranks: dict[int, Rank] = {}
        self.words: dict[str, WorkerError] = {}
        self.handlers: list[Any] = []
        self.pids = 0
        self.strikes: list[str] = []
        self.is_calm = False
        self.watcher = HostWatcher(self)
        self.hosts = [
            Host(self, f"h{at}", serves=at == 0 and not self.plan.is_external)
            for at in range(self.plan.hosts)
        ]

    @property
    def is_done(self) -> bool:
        """Whether all steps are committed."""
        return self.repository.step >= self.plan.steps

    def time_of(self, host: Host) -> float:
        """Return what the monotonic clock of a host says."""
        return self.loop.now_seconds + host.uptime_seconds

    def run(self) -> HostVerdict:
        """Let it all happen."""
        with driven(self), _seldom_switching():
            self.loop.spawn("world", self._main)
            self.loop.run()
        processes = [one for host in self.hosts for one in host.processes]
        return HostVerdict(
            seed=self.seed,
            violations=tuple(self.watcher.violations),
            strikes=tuple(self.strikes),
            lives=len(self.lives),
            sizes=tuple(one.size for one in self.lives.values()),
            codes=tuple(one.code for one in processes),
            switches=self.loop.switches,
            virtual_seconds=self.loop.now_seconds,
        )

    def _main(self) -> None:
        moments: list[tuple[float, Callable[[], None]]] = [
            (self.draw.choice((0.0, 0.5, 4.0)) * self.draw.random(), host.start)
            for host in self.hosts
        ]
        kinds = [self._die, self._come_back, self._cut, self._slow, self._skew, self._freeze]
        kinds += [self._fail, self._kill, self._hang, self._stop, self._come_back]
        moments += [
            (self.draw.uniform(2.0, _STORM_SECONDS), self.draw.choice(kinds))
            for _ in range(self.draw.randrange(6))
        ]
        for at_seconds, act in sorted(moments, key=lambda one: one[0]):
            self.loop.sleep(at_seconds - self.loop.now_seconds)
            act()
        self._calm()
        if not self._is_whole():
            self._start_again_until(self._is_whole, _ADMIT_SECONDS)
        if not self.is_done and not self._is_whole():
            self.watcher.tell(f"hosts are not let in, or nobody goes on: {self._describe()}")
        self.plan.steps = min(self.plan.steps, self.watcher.last_step + 6)
        self._start_again_until(self._is_over, _END_SECONDS)
        if not self._is_over():
            self.watcher.tell(f"a host neither ended nor went on: {self._describe()}")

    def _calm(self) -> None:
        self.is_calm = True
        self.strikes.append(f"{self.loop.now_seconds:.1f} calm")
        for host in self.hosts:
            host.is_up, host.is_cut, host.slow_seconds = True, False, 0.0
        self.network.loss = 0.0
        self.loop.changed()

    def _start_again_until(self, holds: Callable[[], bool], within_seconds: float) -> None:
        """Do as a scheduler does: start what has ended while the job is not done."""
        end_seconds = self.loop.now_seconds + within_seconds
        while not holds() and self.loop.now_seconds < end_seconds:
            for host in self.hosts:
                if not self.is_done:
                    host.start()
            self.loop.sleep(_ROUND_SECONDS)

    def _is_whole(self) -> bool:
        """Say whether as many hosts train as there is room for, right now."""
        size = min(self.plan.nodes_max, self.plan.hosts)
        return self.is_done or self.watcher.trains_with(size)

    def _is_over(self) -> bool:
        return self.is_done and all(host.process is None for host in self.hosts)

    def _describe(self) -> str:
        told = [f"{one.name} {one.processes[-1].code}" for one in self.hosts if one.processes]
        return f"step {self.repository.step} of {self.plan.steps}, {', '.join(told)}"

    def _strike(self, what: str, host: Host) -> None:
        self.strikes.append(f"{self.loop.now_seconds:.1f} {what} {host.name}")

    def _any(self, holds: Callable[[Host], bool]) -> Host | None:
        found = [host for host in self.hosts if holds(host)]
        return self.draw.choice(found) if found else None

    def _die(self) -> None:
        if host := self._any(lambda one: one.is_up):
            self._strike("dies", host)
            host.die()

    def _come_back(self) -> None:
        if host := self._any(lambda one: one.process is None and not self.is_done):
            self._strike("comes back", host)
            host.come_back()

    def _cut(self) -> None:
        if host := self._any(lambda one: one.is_well):
            seconds = self.draw.choice((1.0, 6.0, 12.0, 40.0))
            self._strike(f"is cut off for {seconds:g} s:", host)
            host.is_cut = True
            self._later(seconds, lambda: setattr(host, "is_cut", False))

    def _slow(self) -> None:
        if host := self._any(lambda one: one.is_well):
            seconds = self.draw.choice((0.2, 0.7))
            self._strike(f"has a link slower by {seconds:g} s:", host)
            host.slow_seconds = seconds
            self._later(20.0, lambda: setattr(host, "slow_seconds", 0.0))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        def main() -> None:
            self.loop.sleep(seconds)
            act()
            self.loop.changed()

        self.loop.spawn("later", main)

    def _skew(self) -> None:
        if host := self._any(lambda one: one.is_up):
            self._strike("has its time of day set:", host)
            host.skew_seconds += self.draw.choice((-3600.0, -5.0, 5.0, 3600.0))

    def _freeze(self) -> None:
        if host := self._any(lambda one: one.process is not None):
            seconds = self.draw.choice((1.0, 5.0, 20.0))
            self._strike(f"stands still for {seconds:g} s:", host)
            host.freeze(seconds)

    def _rank(self, what: str) -> Rank | None:
        running = [one for host in self.hosts for one in host.ranks[-1:] if one.status is None]
        if not running:
            return None
        rank = self.draw.choice(running)
        self._strike(f"rank {rank.rank} {what} on", rank.host)
        rank.is_struck = True
        return rank

    def _fail(self) -> None:
        if rank := self._rank("fails"):
            rank.end(1)
            self.loop.kill(rank.task)

    def _kill(self) -> None:
        if rank := self._rank("is killed"):
            rank.end(-9)
            self.loop.kill(rank.task)

    def _hang(self) -> None:
        if rank := self._rank("hangs"):
            rank.is_hung = True

    def _stop(self) -> None:
        if host := self._any(lambda one: one.process is not None):
            self._strike("is asked to stop:", host)
            self.watcher.is_stop_asked = True
            process = host.process
            assert process is not None, "chosen for it"
            process.signals.append(15)


def _plan(draw: Random) -> Plan:
    hosts = draw.choice((2, 3, 3, 4))
    nodes_max = draw.choice((hosts, hosts, max(hosts - 1, 2)))
    return Plan(
        hosts=hosts,
        nodes_min=draw.choice((1, 1, 2, nodes_max)),
        nodes_max=nodes_max,
        steps=draw.choice((25, 60, _ENDLESS, _ENDLESS)),
        every=draw.choice((2, 4)),
        step_seconds=draw.choice((0.5, 1.0)),
        is_external=draw.random() < 0.6,
        waits_for_comeback=draw.random() < 0.6,
    )


@contextmanager
def _seldom_switching() -> Iterator[None]:
    """Keep the interpreter from offering the lock to threads that could not run anyway."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def simulate_hosts(seed: int) -> HostVerdict:
    """Return what came of a seed; the same each time."""
    return HostStorm(seed).run()
