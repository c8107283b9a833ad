"""Agent's side of the fork server: start of the server, requests for workers, and stop.

The fork server is a process that forks workers with their packages already imported.

After any failure of the fork server, each worker starts as a new process and does its own imports.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from resilient.events import Event, Level

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient.elastic.workers.group import WorkerCommand
    from resilient.events import Emitter

_FORK_SERVER = Path(__file__).with_name("fork_server.py")
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PR_SET_CHILD_SUBREAPER = 36
_ANSWER_SECONDS = 2.0
_HEADER_BYTES = 8
_LINE_BYTES = 1 << 10
_DEATHS_MAX = 3
_RANK_VARIABLES = frozenset(
    ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
)


@dataclass(frozen=True, slots=True)
class ForkServerUnusable(Event):
    """The next attempt starts without the fork server, so each worker imports by itself."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "workers are started without the fork server: {reason}"
    reason: str


class ForkServer:
    """Supervisor of the fork server, from the first attempt on.

    Main thread only, because the kernel ties the workers to the thread.

    Args:
        folder: Folder of the agent, where the first worker records its imports.
        emit: Listener for events.
        is_on: Whether the fork server is enabled.
    """

    def __init__(self, folder: Path, emit: Emitter, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._imports = folder / "imports"
        self._emit = emit
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._deaths = 0
        self._environ: dict[str, str] | None = None

    @property
    def pid(self) -> int:
        """Process id of the fork server, 0 without one."""
        return self._process.pid if self._process else 0

    def import_log_environ(self, local_rank: int) -> dict[str, str]:
        """Return the variables that make the first worker record its imports."""
        return {"RESILIENT_IMPORTS": str(self._imports)} if self._is_on and not local_rank else {}

    def keep(self, command: WorkerCommand | None = None) -> None:
        """Start a fork server for workers like ``command``, or replace a dead one.

        Until the first call with a command, the method does nothing. After 3 deaths it starts no
        fork server again.
        """
        if command is not None and self._is_on:
            self._environ = {k: v for k, v in command.environ.items() if k not in _RANK_VARIABLES}
        if self._process and self._process.poll() is not None:
            self._deaths += 1
            status = self._process.returncode
            self.stop()
            if self._deaths >= _DEATHS_MAX:
                self._emit(ForkServerUnusable(f"the fork server ended with {status}"))
        if self._process is None and self._environ is not None and self._deaths < _DEATHS_MAX:
            self._start(self._environ)

    def spawn(self, commands: Sequence[WorkerCommand]) -> list[int]:
        """Return the pids of forked workers, children of this process; empty on any failure.

        The processes behave as if started by :class:`subprocess.Popen` in their own sessions. A
        process that is not returned has run no part of a worker's program.
        """
        if self._channel is None or not all(map(_is_python, commands)):
            return []
        pairs = [socket.socketpair() for _ in commands]
        try:
            with _adopting():
                pids = self._ask(self._channel, commands, pairs)
            if len(pids) == len(commands):
                for agent_end, _ in pairs:
                    agent_end.send(b"!")
                return pids
        except OSError:
            pids = []
        finally:
            for agent_end, worker_end in pairs:
                agent_end.close()
                worker_end.close()
        for pid in pids:
            # The worker reads end of file instead of the word to continue, and exits.
            os.waitpid(pid, 0)
        return []

    def stop(self) -> None:
        """Stop the fork server; its workers continue."""
        process, self._process = self._process, None
        channel, self._channel = self._channel, None
        if channel:
            channel.close()
        if process:
            process.kill()
            process.wait()

    def _start(self, environ: Mapping[str, str]) -> None:
        agent_end, worker_end = socket.socketpair()
        argv = [
            sys.executable,
            "-u",
            str(_FORK_SERVER),
            str(worker_end.fileno()),
            str(self._imports),
        ]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                argv, env=environ, pass_fds=[worker_end.fileno()], start_new_session=True
            )
        except OSError:
            agent_end.close()
            self._deaths += 1
            return
        finally:
            worker_end.close()
        self._channel = agent_end

    def _ask(
        self,
        channel: socket.socket,
        commands: Sequence[WorkerCommand],
        pairs: Sequence[tuple[socket.socket, socket.socket]],
    ) -> list[int]:
        request = [
            {"environ": dict(command.environ), "arguments": command.argv[3:]}
            for command in commands
        ]
        text = json.dumps(request).encode()
        channel.settimeout(_ANSWER_SECONDS)
        socket.send_fds(
            channel,
            [len(text).to_bytes(_HEADER_BYTES, "big")],
            [worker_end.fileno() for _, worker_end in pairs],
        )
        channel.sendall(text)
        pids = []
        for agent_end, worker_end in pairs:
            worker_end.close()
            agent_end.settimeout(_ANSWER_SECONDS)
            answer = ""
            with suppress(TimeoutError):
                answer = agent_end.recv(_LINE_BYTES).decode()
            if not answer.strip().isdecimal():
                self._handle_refusal(answer.strip())
                break
            pids.append(int(answer))
        return pids

    def _handle_refusal(self, answer: str) -> None:
        """Handle a refusal; stop a silent fork server, so that a late answer has no effect."""
        if answer == "early":
            return
        if not answer:
            self.stop()
        reason = answer.removeprefix("refused ") or "the fork server does not answer"
        self._emit(ForkServerUnusable(reason))


def _is_python(command: WorkerCommand) -> bool:
    return command.argv[:3] == (sys.executable, "-u", str(_BOOTSTRAP))


@contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of orphaned descendants inside the block."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
