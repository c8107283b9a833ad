"""One group of worker processes: start it, watch it, stop it. Linux only.

Each worker leads a session of its own. An exit is noticed through a pidfd, at once. Workers
that ended stay zombies until :meth:`WorkerGroup.close`, so that their process group keeps its
number and what they left behind can be killed without hitting a stranger.
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
    """How to start one worker.

    Attributes:
        rank: among all ranks of the world.
        local_rank: among those of this host.
        argv: program and arguments.
        environ: the whole environment.
        error_file: where the worker leaves its error.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    error_file: Path


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How one worker ended.

    Attributes:
        command: what it was started with.
        pid: its process.
        status: its exit code, or minus the number of the signal that killed it.
        seen_at_seconds: when the exit was noticed, on the monotonic clock.
        alive_at_seconds: the last time before at which it was known to live.
        is_killed: whether it was us who killed it.
    """

    command: WorkerCommand
    pid: int
    status: int
    seen_at_seconds: float
    alive_at_seconds: float
    is_killed: bool


class Spawner(Protocol):
    """What may have workers at hand that need not be started from nothing."""

    def spawn(self, commands: Sequence[WorkerCommand]) -> list[int]:
        """Return the processes of the workers, children of this one; none if it has none."""


class _Process(Protocol):
    @property
    def pid(self) -> int:
        """Its number."""

    def wait(self) -> object:
        """Reap it."""


@dataclass(frozen=True, slots=True)
class _Spawned:
    """A child that subprocess does not know."""

    pid: int

    def wait(self) -> object:
        """Reap it."""
        return os.waitpid(self.pid, 0)


@dataclass(slots=True)
class _Running:
    command: WorkerCommand
    process: _Process
    pidfd: int


class WorkerGroup:
    """The workers of one life on this host.

    Started from one thread and, because the kernel ties them to it, for as long as that thread
    lives: call from the main thread.

    Args:
        commands: one per worker.
        clock: tells when an exit was noticed.
        spawner: asked for processes before they are started cold.

    Attributes:
        is_warm: whether the spawner had them.

    Raises:
        OSError: a worker could not be started; those before it are killed.
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
        spawned = [_Spawned(pid) for pid in spawner.spawn(commands)] if spawner else []
        self.is_warm = bool(spawned)
        for command, process in zip(commands, spawned, strict=False):
            self._add(command, process)
        try:
            for command in commands[len(spawned) :]:
                self._add(command, _start(command))
        except OSError:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """Whether any worker has not ended yet."""
        return len(self.exits) < len(self._all)

    @property
    def running_ranks(self) -> list[int]:
        """The ranks that have not ended yet."""
        ended = {exit_.pid for exit_ in self.exits}
        return [one.command.rank for one in self._all if one.process.pid not in ended]

    @property
    def pids(self) -> dict[int, int]:
        """The process of every worker by local rank."""
        return {one.command.local_rank: one.process.pid for one in self._all}

    def wait(self, within_seconds: float) -> list[WorkerExit]:
        """Return the exits noticed now; waits for the first one, at most ``within_seconds``."""
        if not self.is_running:
            self._clock.sleep(within_seconds)
            return []
        ready = self._selector.select(within_seconds)
        now_seconds = self._clock.monotonic_seconds()
        new = [self._ended(key.data, now_seconds) for key, _ in ready]
        self._looked_at_seconds = now_seconds
        self.exits += new
        return new

    def signal(self, number: int) -> None:
        """Send a signal to the workers that run, and not to what they have started.

        A worker's own children (data loaders) must outlive the request to stop, or the
        worker would fail on their loss instead of saving.
        """
        ended = {exit_.pid for exit_ in self.exits}
        for one in self._all:
            if one.process.pid not in ended:
                # Unreaped, so the number cannot belong to anyone else.
                os.kill(one.process.pid, number)

    def kill(self) -> None:
        """Kill every process group, with what ended workers have left behind."""
        self._is_killing = True
        for one in self._all:
            try:
                os.killpg(one.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def stop(self, within_seconds: float) -> None:
        """End all workers: SIGTERM, ``within_seconds`` to end, SIGKILL."""
        if self.is_running:
            self.signal(signal.SIGTERM)
            self.wait_for_all(within_seconds)
        self.kill()
        self.wait_for_all(_REAP_SECONDS)

    def wait_for_all(self, within_seconds: float) -> bool:
        """Wait for every worker to end and say whether all did, at most ``within_seconds``."""
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        while self.is_running and self._clock.monotonic_seconds() < deadline_seconds:
            self.wait(_TICK_SECONDS)
        return not self.is_running

    def close(self) -> None:
        """Reap the workers that ended and kill those that have not."""
        if self.is_running:
            self.kill()
            self.wait_for_all(_REAP_SECONDS)
        ended = {exit_.pid for exit_ in self.exits}
        for one in self._all:
            if one.process.pid in ended:
                one.process.wait()
            os.close(one.pidfd)
        self._all.clear()
        self._selector.close()

    def _add(self, command: WorkerCommand, process: _Process) -> None:
        one = _Running(command, process, os.pidfd_open(process.pid))
        self._all.append(one)
        self._selector.register(one.pidfd, selectors.EVENT_READ, one)

    def _ended(self, one: _Running, now_seconds: float) -> WorkerExit:
        self._selector.unregister(one.pidfd)
        info = os.waitid(os.P_PIDFD, one.pidfd, os.WEXITED | os.WNOWAIT)
        assert info is not None, "a readable pidfd has an exit to show"  # noqa: S101
        is_code = info.si_code == os.CLD_EXITED
        return WorkerExit(
            command=one.command,
            pid=one.process.pid,
            status=info.si_status if is_code else -info.si_status,
            seen_at_seconds=now_seconds,
            alive_at_seconds=self._looked_at_seconds,
            is_killed=self._is_killing and not is_code,
        )


def _start(command: WorkerCommand) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the user's own program
        command.argv, env=command.environ, start_new_session=True
    )
