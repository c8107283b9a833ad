"""Worker processes of this host for one attempt: start, watch and stop. Linux only.

An attempt is one start of all ranks of the run.

Each worker leads its own session. A pidfd reports an exit at once. An ended worker stays a zombie
until :meth:`WorkerGroup.close`, so no other process group gets its id. Until then, the agent can
kill the remaining children of the worker by this id.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from resilient.clock import Clock

_TICK_SECONDS = 0.05
_REAP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """Start command of one worker.

    Attributes:
        rank: Global rank.
        local_rank: Rank among the workers of this host.
        argv: Program and arguments.
        environ: Complete environment.
        error_file: File for the worker's error.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    error_file: Path


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """Exit of one worker.

    Attributes:
        command: Start command of the worker.
        pid: Process id.
        status: Exit code, or minus the number of the signal that killed the worker.
        seen_at_seconds: Time at which the exit was noticed, monotonic seconds.
        alive_at_seconds: Last earlier time at which the worker was known to run.
        is_killed: Whether the agent killed the worker.
    """

    command: WorkerCommand
    pid: int
    status: int
    seen_at_seconds: float
    alive_at_seconds: float
    is_killed: bool


class Spawner(Protocol):
    """Provider of worker processes that are already running."""

    def spawn(self, commands: Sequence[WorkerCommand]) -> list[int]:
        """Return the pids of workers, children of this process; empty if none are available."""


class _Process(Protocol):
    @property
    def pid(self) -> int:
        """Process id."""

    def wait(self) -> object:
        """Reap the process."""


@dataclass(frozen=True, slots=True)
class _Spawned:
    """Child process that subprocess did not start."""

    pid: int

    def wait(self) -> object:
        """Reap the process."""
        return os.waitpid(self.pid, 0)


@dataclass(slots=True)
class _Running:
    command: WorkerCommand
    process: _Process
    pidfd: int


class WorkerGroup:
    """Workers of one attempt on this host.

    Main thread only, because the kernel kills the workers when the thread that started them ends.

    Args:
        commands: One command per worker.
        clock: Clock for the times of exits.
        spawner: Provider to try before a new start.

    Attributes:
        is_warm: Whether the spawner provided the workers.

    Raises:
        OSError: A worker could not be started; earlier ones are killed.
    """

    def __init__(
        self, commands: Sequence[WorkerCommand], clock: Clock, spawner: Spawner | None = None
    ) -> None:
        self.exits: list[WorkerExit] = []
        self._clock = clock
        self._all: list[_Running] = []
        self._selector = selectors.DefaultSelector()
        self._is_killing = False
        self._looked_at_seconds = clock.monotonic_seconds()
        spawned_processes = [_Spawned(pid) for pid in spawner.spawn(commands)] if spawner else []
        self.is_warm = bool(spawned_processes)
        for command, process in zip(commands, spawned_processes, strict=False):
            self._add(command, process)
        try:
            for command in commands[len(spawned_processes) :]:
                self._add(command, _start(command))
        except OSError:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """True if any worker still runs."""
        return len(self.exits) < len(self._all)

    @property
    def running_ranks(self) -> list[int]:
        """Ranks that still run."""
        ended_pids = {exit_.pid for exit_ in self.exits}
        return [worker.command.rank for worker in self._all if worker.process.pid not in ended_pids]

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every worker by local rank."""
        return {worker.command.local_rank: worker.process.pid for worker in self._all}

    def wait(self, within_seconds: float) -> list[WorkerExit]:
        """Return new exits; wait for the first one, at most ``within_seconds``."""
        if not self.is_running:
            self._clock.sleep(within_seconds)
            return []
        ready_keys = self._selector.select(within_seconds)
        now_seconds = self._clock.monotonic_seconds()
        new_exits = [self._ended(key.data, now_seconds) for key, _ in ready_keys]
        self._looked_at_seconds = now_seconds
        self.exits += new_exits
        return new_exits

    def signal(self, number: int) -> None:
        """Send a signal to the running workers, but not to their children.

        A worker's own children (data loaders) must outlive the stop request. Otherwise the worker
        would fail on their loss instead of saving.
        """
        ended_pids = {exit_.pid for exit_ in self.exits}
        for worker in self._all:
            if worker.process.pid not in ended_pids:
                # The process is not reaped, so its id cannot belong to another process.
                os.kill(worker.process.pid, number)

    def kill(self) -> None:
        """Kill every process group, including remaining children of ended workers."""
        self._is_killing = True
        for worker in self._all:
            try:
                os.killpg(worker.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def stop(self, within_seconds: float) -> None:
        """Stop all workers: SIGTERM, ``within_seconds`` to end, SIGKILL."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            self.wait_for_all(within_seconds)
        self.kill()
        self.wait_for_all(_REAP_SECONDS)

    def wait_for_all(self, within_seconds: float) -> bool:
        """Wait at most ``within_seconds`` for every worker to end; return whether all did."""
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        while self.is_running and self._clock.monotonic_seconds() < deadline_seconds:
            self.wait(_TICK_SECONDS)
        return not self.is_running

    def close(self) -> None:
        """Reap the ended workers and kill the others."""
        if self.is_running:
            self.kill()
            self.wait_for_all(_REAP_SECONDS)
        ended_pids = {exit_.pid for exit_ in self.exits}
        for worker in self._all:
            if worker.process.pid in ended_pids:
                worker.process.wait()
            os.close(worker.pidfd)
        self._all.clear()
        self._selector.close()

    def _add(self, command: WorkerCommand, process: _Process) -> None:
        worker = _Running(command, process, os.pidfd_open(process.pid))
        self._all.append(worker)
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)

    def _ended(self, worker: _Running, now_seconds: float) -> WorkerExit:
        self._selector.unregister(worker.pidfd)
        info = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT)
        assert info is not None, "a readable pidfd means that the process has ended"  # noqa: S101
        is_code = info.si_code == os.CLD_EXITED
        return WorkerExit(
            command=worker.command,
            pid=worker.process.pid,
            status=info.si_status if is_code else -info.si_status,
            seen_at_seconds=now_seconds,
            alive_at_seconds=self._looked_at_seconds,
            is_killed=self._is_killing and not is_code,
        )


def _start(command: WorkerCommand) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the user's own program
        command.argv, env=command.environ, start_new_session=True
    )
