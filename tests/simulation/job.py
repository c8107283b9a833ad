"""One simulated job: an agent starts lives, sees how they end, and asks the table what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resilient.distributed.launch_env import World
from resilient.elastic.outcome import ECHO_CODES, Cause, Outcome, OutcomeKind
from resilient.elastic.restart_policy import FailureHistory, FailureLimits, Restart, decide
from resilient.errors import ResilientError
from tests.simulation.loop import Dead
from tests.simulation.places import Hub, Link
from tests.simulation.rank import Plan, Rank

if TYPE_CHECKING:
    from resilient.testing.memory_store import MemoryStore
    from tests.simulation.loop import Loop, Task
    from tests.simulation.watcher import Watcher

_SIGKILL, _SIGTERM = -9, 15
_DETECT_SECONDS = 0.2


@dataclass
class Life:
    """The ranks of one life, and the board that the agent serves for them."""

    hub: Hub
    ranks: list[Rank]
    links: list[Link]
    tasks: list[Task] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(task.is_done for task in self.tasks)

    @property
    def first_failed(self) -> Task | None:
        return next((one for one in self.tasks if one.is_done and one.error is not None), None)


@dataclass
class SimJob:
    """An agent and what it watches over.

    Attributes:
        errors: share of a store's answers that fail; ``loss``: of messages that come later.
        lives: all so far.
        code: what the job ended with; None while it goes on, or when its agent was killed.
    """

    loop: Loop
    plan: Plan
    shared: MemoryStore
    watcher: Watcher
    errors: float = 0.0
    loss: float = 0.0
    lives: list[Life] = field(default_factory=list)
    stop_signal: int = 0
    code: int | None = None

    def main(self) -> int:
        """Live until the table says to leave."""
        limits, history, cause = FailureLimits(), FailureHistory(), "start"
        while True:
            commits = self.watcher.commits
            life = self._begin(cause)
            outcome = self._watch(life)
            now_seconds, progressed = self.loop.now_seconds, self.watcher.commits > commits
            history = history.after(outcome, now_seconds, progressed=progressed)
            action = decide(outcome, history.budget(limits, now_seconds, seed="simulated"))
            if not isinstance(action, Restart):
                self.code = action.code
                self.watcher.ended(action.code)
                return action.code
            cause = action.cause
            self.loop.sleep(action.delay_seconds + self.loop.draw.uniform(0.05, 0.5))

    def ask_to_stop(self, rank: int) -> None:
        """Let the stop reach one rank first: the others learn it from that one."""
        self.stop_signal = _SIGTERM
        gate = self.lives[-1].ranks[rank].gate if self.lives else None
        if gate is not None:
            gate.request_stop("SIGTERM")

    def _begin(self, cause: str) -> Life:
        hub = Hub(self.loop)
        links = [Link(self.loop, self.loss, self.errors) for _ in range(self.plan.ranks)]
        ranks = [
            Rank(
                self.loop,
                self.plan,
                World(at, self.plan.ranks, at),
                hub,
                link,
                self.shared,
                self.watcher,
                cause,
            )
            for at, link in enumerate(links)
        ]
        life = Life(hub, ranks, links)
        self.lives.append(life)
        life.tasks = [self.loop.spawn(f"rank-{one.world.rank}", one.main) for one in ranks]
        return life

    def _watch(self, life: Life) -> Outcome:
        self.loop.wait(lambda: life.is_over or _is_failed(life.first_failed), float("inf"))
        failed = life.first_failed
        if failed is None:
            return Outcome(OutcomeKind.SUCCEEDED)
        # Whoever is still there is ended, and what it does until then it does.
        self.loop.sleep(self.loop.draw.uniform(0.0, _DETECT_SECONDS))
        for task in life.tasks:
            self.loop.kill(task)
        self.loop.wait(lambda: life.is_over, float("inf"))
        return outcome_of(failed.error, self.stop_signal)


def _is_failed(task: Task | None) -> bool:
    return task is not None and _status(task.error) != _PREEMPTED


_PREEMPTED = 75


def outcome_of(error: BaseException | None, stop_signal: int) -> Outcome:
    """Return how a life ended whose first rank ended with this error."""
    status = _status(error)
    if status == _PREEMPTED:
        kind = OutcomeKind.STOPPED if stop_signal else OutcomeKind.PREEMPTED
        return Outcome(kind, status, stop_signal)
    is_echo = isinstance(error, ResilientError) and error.code in ECHO_CODES
    cause = Cause.PEER if is_echo else Cause.SIGNAL if status < 0 else Cause.EXIT
    return Outcome(OutcomeKind.FAILED, status, stop_signal, is_echo, cause=cause)


def _status(error: BaseException | None) -> int:
    if isinstance(error, Dead):
        return _SIGKILL
    return error.exit_code if isinstance(error, ResilientError) else 1
