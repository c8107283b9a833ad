"""The processes of ranks: they meet, step together, save together, and end as the trainer's do."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from resilient.distributed.heartbeat import Phase, ProgressRecord
from resilient.elastic.worker_errors import WorkerError
from resilient.elastic.workers.group import WorkerExit, WorkerGroup
from resilient.errors import DeadlineExceeded, Fenced, PeerFailed
from tests.simulation.hosts.network import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.elastic.workers.group import WorkerCommand
    from tests.simulation.hosts.host import Host
    from tests.simulation.hosts.storm import HostStorm
    from tests.simulation.loop import Task

_PREEMPTED = 75
_SAVE_SECONDS = 15.0


@dataclass
class Repository:
    """What is committed, outside of all hosts.

    Attributes:
        claims: which life has each number.
        step: of the newest checkpoint.
    """

    claims: list[str] = field(default_factory=list)
    step: int = 0
    commits: int = 0


@dataclass
class Together:
    """The ranks of one life, as their collectives see them.

    Attributes:
        arrived: who came to which place, and whether it was asked to stop.
        number: of the life, once its first rank has claimed one.
    """

    attempt: str
    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    arrived: dict[Any, dict[int, bool]] = field(default_factory=dict)
    number: int = 0
    begins_at: int = 0


class Gone(Exception):
    """Another rank has ended, or was silent for too long."""

    def __init__(self, kind: type[PeerFailed | DeadlineExceeded | Fenced]) -> None:
        super().__init__(kind.__name__)
        self.kind = kind


class Rank:
    """One rank: a process of a host, in virtual time.

    Attributes:
        status: how it ended; None while it runs.
        is_hung: it does not get on any more.
        is_struck: a fault hit it, so its end is its own.
    """

    def __init__(self, storm: HostStorm, host: Host, command: WorkerCommand, pid: int) -> None:
        told = command.environ
        self.storm, self.host, self.command, self.pid = storm, host, command, pid
        self.rank, self.size = int(told["RANK"]), int(told["WORLD_SIZE"])
        self.status: int | None = None
        self.is_hung = self.is_struck = self.is_told = self.is_killed = False
        self.step, self.phase, self.since_seconds = -1, Phase.OUTSIDE, 0.0
        place = storm.boards[told["MASTER_ADDR"], int(told["MASTER_PORT"])]
        self.board = Client(storm.network, host, place)
        attempt = told["RESILIENT_ATTEMPT"]
        self.together = storm.lives.setdefault(attempt, Together(attempt, self.size))
        storm.watcher.started(self)
        self.together.ranks[self.rank] = self
        self.task: Task = storm.loop.spawn(f"rank-{self.rank}", self._main)

    @property
    def signs(self) -> ProgressRecord:
        """What it shows of its progress."""
        return ProgressRecord(self.step, self.phase, self.since_seconds, (0.0,) * len(Phase), ())

    @property
    def state(self) -> str:
        """Of its process, as the kernel has it: one that hangs is busy, who waits is asleep."""
        return "R" if self.is_hung else "S"

    def end(self, status: int, kind: Any = None, *, is_killed: bool = False) -> None:
        """Be no more, from here on."""
        if self.status is not None:
            return
        self.status, self.is_killed = status, is_killed
        if kind is not None:
            now_seconds = self.storm.time_of(self.host)
            error = WorkerError(
                message=kind.__name__, code=kind.code, exit_code=status, at_seconds=now_seconds
            )
            self.storm.words[str(self.command.error_file)] = error
        self.storm.loop.changed()

    def signal(self, number: int) -> None:
        """Hear a signal: outside training it ends the process, as SIGTERM does."""
        if self.status is not None:
            return
        if number == signal.SIGKILL or (number == signal.SIGTERM and self.phase is Phase.OUTSIDE):
            self.end(-number, is_killed=number == signal.SIGKILL)
            self.storm.loop.kill(self.task)
        self.is_told = True

    def _main(self) -> None:
        storm = self.storm
        try:
            storm.loop.sleep(storm.draw.uniform(0.2, 1.5))
            self._enter(Phase.FIRST)
            self._meet("start")
            self._begin()
            code = self._train()
        except Gone as gone:
            storm.loop.sleep(storm.draw.uniform(0.02, 0.3))
            self.end(gone.kind.exit_code, gone.kind)
        except dist.DistError:
            self.end(PeerFailed.exit_code, PeerFailed)
        else:
            self._enter(Phase.OUTSIDE)
            storm.loop.sleep(storm.draw.uniform(0.02, 0.4))
            self.end(code)

    def _begin(self) -> None:
        """Claim a number for the life, and go on from what is committed."""
        held, one = self.storm.repository, self.together
        if self.rank == 0:
            held.claims.append(one.attempt)
            one.number, one.begins_at = len(held.claims), held.step
        self._meet("begun")
        self.step = one.begins_at - 1

    def _train(self) -> int:
        storm, at = self.storm, self.together.begins_at
        while at < storm.plan.steps:
            self._enter(Phase.STEP)
            storm.loop.sleep(storm.plan.step_seconds * storm.draw.uniform(0.8, 1.2))
            if self.is_hung:
                storm.loop.wait(lambda: False, float("inf"))
            is_stopping = self._meet(("step", at))
            self.step, at = at, at + 1
            storm.watcher.stepped(self)
            if is_stopping or at % storm.plan.every == 0 or at == storm.plan.steps:
                self._save(at)
            if is_stopping and at < storm.plan.steps:
                return _PREEMPTED
        return 0

    def _meet(self, place: Any) -> bool:
        """Wait for all ranks there, as in a collective; say whether any was asked to stop."""
        loop, arrived = self.storm.loop, self.together.arrived.setdefault(place, {})
        arrived[self.rank] = self.is_told
        loop.changed()
        loop.wait(lambda: self._is_met(arrived) or self._is_left(arrived), float("inf"))
        if not self._is_met(arrived):
            raise Gone(PeerFailed)
        others = [one.host for one in self.together.ranks.values()]
        loop.sleep(max(self.storm.network.hop_seconds(self.host, other) for other in others))
        return any(arrived.values())

    def _is_met(self, arrived: dict[int, bool]) -> bool:
        ranks, network = self.together.ranks, self.storm.network
        return len(arrived) == self.size and all(
            network.is_open(self.host, ranks[one].host) for one in arrived
        )

    def _is_left(self, arrived: dict[int, bool]) -> bool:
        """Say whether a rank has ended that others see end: its connection is closed."""
        network = self.storm.network
        return any(
            one.status is not None
            and one.rank not in arrived
            and network.is_open(self.host, one.host)
            for one in self.together.ranks.values()
        )

    def _save(self, at: int) -> None:
        """Show a receipt, and leave with the ruling of the first rank over all of them."""
        self._enter(Phase.SAVING)
        self.storm.loop.sleep(self.storm.draw.uniform(0.05, 0.5))
        self.board.set(f"receipt/{at}/{self.rank}", "1")
        if self.rank == 0:
            receipts = [f"receipt/{at}/{rank}" for rank in range(self.size)]
            is_whole = self._hears(receipts, _SAVE_SECONDS)
            ruling = self._rule(at, is_whole=is_whole)
            self.board.set(f"ruling/{at}", ruling)
        elif self._hears([f"ruling/{at}"], 2 * _SAVE_SECONDS):
            ruling = self.board.get(f"ruling/{at}").decode()
        else:
            ruling = DeadlineExceeded.__name__
        for kind in (DeadlineExceeded, Fenced):
            if ruling == kind.__name__:
                raise Gone(kind)

    def _hears(self, keys: Sequence[str], within_seconds: float) -> bool:
        end_seconds = self.storm.loop.now_seconds + within_seconds
        while not self.board.check(keys):
            if self.storm.loop.now_seconds > end_seconds:
                return False
            self.storm.loop.sleep(0.3)
        return True

    def _rule(self, at: int, *, is_whole: bool) -> str:
        held, together = self.storm.repository, self.together
        if not is_whole:
            return DeadlineExceeded.__name__
        if together.number < len(held.claims):
            return Fenced.__name__
        self.storm.watcher.committed(self, at)
        held.step, held.commits = max(at, held.step), held.commits + 1
        return json.dumps(at)

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since_seconds = phase, self.storm.time_of(self.host)


@dataclass
class _Process:
    """What the library's group knows of a rank."""

    pid: int


@dataclass
class _Held:
    command: WorkerCommand
    process: _Process
    rank: Rank


class SimGroup(WorkerGroup):
    """The library's group over simulated processes: how it waits, signals and kills is its own."""

    def __init__(self, storm: HostStorm, commands: Sequence[WorkerCommand], clock: Any) -> None:
        self._storm = storm
        self._clock = clock
        self.exits, self.is_warm, self._is_killing = [], False, False
        self._looked_at_seconds = clock.monotonic_seconds()
        self._all = []
        for command in commands:
            storm.pids += 1
            host = storm.loop.process.host
            rank = Rank(storm, host, command, storm.pids)
            host.ranks.append(rank)
            storm.ranks[rank.pid] = rank
            self._all.append(_Held(command, _Process(rank.pid), rank))  # type: ignore[arg-type]

    @property
    def ranks(self) -> list[Rank]:
        """All of them."""
        return [one.rank for one in self._all]  # type: ignore[attr-defined]

    def wait(self, within_seconds: float) -> list[WorkerExit]:
        if not self.is_running:
            self._clock.sleep(within_seconds)
            return []
        ended: Callable[[], list[Rank]] = lambda: [  # noqa: E731 - asked again and again
            one
            for one in self.ranks
            if one.status is not None and one.pid not in {known.pid for known in self.exits}
        ]
        self._storm.loop.wait(lambda: bool(ended()), within_seconds)
        now_seconds = self._clock.monotonic_seconds()
        new = [
            WorkerExit(
                command=one.command,
                pid=one.pid,
                status=int(one.status or 0),
                seen_at_seconds=now_seconds,
                alive_at_seconds=self._looked_at_seconds,
                is_killed=one.is_killed and self._is_killing,
            )
            for one in ended()
        ]
        self._looked_at_seconds = now_seconds
        self.exits += new
        return new

    def signal(self, number: int) -> None:
        for one in self.ranks:
            one.signal(number)

    def kill(self) -> None:
        self._is_killing = True
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
