"""One seed: a small world, what goes wrong in it, and what must hold afterwards."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from resilient.testing.memory_store import MemoryStore
from resilient.train import preemption
from tests.simulation.job import SimJob
from tests.simulation.loop import Loop
from tests.simulation.rank import Plan
from tests.simulation.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.simulation.loop import Task

_STORM_SECONDS = 12.0
_END_SECONDS = 4000.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a seed."""

    seed: int
    violations: tuple[str, ...]
    commits: int
    lives: int
    switches: int
    codes: tuple[int | None, ...]
    virtual_seconds: float


class Storm:
    """A world of a seed.

    Args:
        seed: decides everything in it.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = draw = Random(seed)
        self.loop = Loop(draw)
        self.shared = MemoryStore()
        self.watcher = Watcher(self.loop, self.shared)
        self.plan = Plan(
            ranks=draw.choice((1, 2, 2, 3)),
            steps=draw.choice((4, 6)),
            every=draw.choice((1, 2)),
            keep_last=draw.choice((1, 2)),
            is_sharded=draw.random() < 0.5,
        )
        self.errors = draw.choice((0.0, 0.0, 0.02, 0.15))
        self.loss = draw.choice((0.0, 0.02, 0.1))
        self.jobs: list[SimJob] = []
        self.agents: list[Task] = []

    def run(self) -> Verdict:
        """Let it all happen."""
        self.loop.spawn("world", self._main)
        with _patient(), _seldom_switching():
            self.loop.run()
        lives = sum(len(job.lives) for job in self.jobs)
        codes = tuple(job.code for job in self.jobs)
        told = tuple(self.watcher.violations)
        return Verdict(
            self.seed,
            told,
            self.watcher.commits,
            lives,
            self.loop.switches,
            codes,
            self.loop.now_seconds,
        )

    def _main(self) -> None:
        self._submit()
        strikes: list[Callable[[], None]] = [self._kill, self._freeze, self._cut, self._sicken]
        strikes += [self._stop, self._orphan, self._submit]
        moments = sorted(
            self.draw.uniform(0, _STORM_SECONDS) for _ in range(self.draw.randrange(6))
        )
        for at_seconds in moments:
            self.loop.sleep(at_seconds - self.loop.now_seconds)
            self.draw.choice(strikes)()
        if not self.loop.wait(self._is_calm, _END_SECONDS):
            self.watcher.violations.append("a job neither ended nor went on")
        self.errors = self.loss = 0.0
        self._submit()
        self.loop.wait(self._is_calm, _END_SECONDS)
        self.watcher.finished(self.jobs[-1].code, self.plan.steps)

    def _is_calm(self) -> bool:
        lives = (life for job in self.jobs for life in job.lives)
        return all(agent.is_done for agent in self.agents) and all(one.is_over for one in lives)

    def _submit(self) -> None:
        """Start a job, whether or not another one is there."""
        job = SimJob(self.loop, self.plan, self.shared, self.watcher, self.errors, self.loss)
        self.jobs.append(job)
        self.agents.append(self.loop.spawn("agent", job.main))

    def _kill(self) -> None:
        life = self.jobs[-1].lives[-1:]
        if life:
            self.loop.kill(self.draw.choice(life[0].tasks))

    def _freeze(self) -> None:
        life = self.jobs[-1].lives[-1:]
        if life:
            seconds = self.draw.choice((0.3, 3.0, 30.0))
            self.loop.freeze(self.draw.choice(life[0].tasks), seconds)

    def _cut(self) -> None:
        for life in self.jobs[-1].lives[-1:]:
            seconds = self.draw.choice((0.5, 5.0, 60.0))
            self.draw.choice(life.links).cut_until_seconds = self.loop.now_seconds + seconds

    def _sicken(self) -> None:
        for life in self.jobs[-1].lives[-1:]:
            seconds = self.draw.choice((2.0, 15.0))
            self.draw.choice(life.links).sick_until_seconds = self.loop.now_seconds + seconds

    def _stop(self) -> None:
        self.jobs[-1].ask_to_stop(self.draw.randrange(self.plan.ranks))

    def _orphan(self) -> None:
        """Kill the agent; its workers go on, and another job is started at once."""
        self.loop.kill(self.agents[-1])
        self._submit()


@contextmanager
def _patient() -> Iterator[None]:
    """Have a stop asked for more seldom: each look is a few turns of the loop."""
    before, preemption._POLL_SECONDS = preemption._POLL_SECONDS, _POLL_SECONDS
    try:
        yield
    finally:
        preemption._POLL_SECONDS = before


@contextmanager
def _seldom_switching() -> Iterator[None]:
    """Keep the interpreter from offering the lock to threads that could not run anyway."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def simulate(seed: int) -> Verdict:
    """Return what came of a seed; the same each time."""
    return Storm(seed).run()
