"""Start and supervise the saver daemon; its memory limit.

The keeper of this host, as the agent sees it: start it, tell its death, let it go last.

How much memory of this host the keeper may have: what was asked for, and what there is.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from resilient.errors import ConfigError
from resilient.events import Event, Level
from resilient.storage.shared_memory import ROOT, available_memory_bytes, free_bytes, sweep

if TYPE_CHECKING:
    from resilient.elastic.options import DaemonOptions
    from resilient.events import Emitter

_MARGIN_SECONDS = 5.0
_READY_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class DaemonExited(Event):
    """The keeper of this host ended; the trainers persist by themselves meanwhile."""

    level: ClassVar[Level] = Level.WARNING
    status: int
    follows: str

    def line(self) -> str:
        """Say how it ended and what follows."""
        return f"the keeper of staged checkpoints ended with {self.status}: {self.follows}"


@dataclass(frozen=True, slots=True)
class DaemonUnavailable(Event):
    """This host has no keeper: what is in flight when trainers die is lost with them."""

    level: ClassVar[Level] = Level.WARNING
    reason: str

    def line(self) -> str:
        """Say why, and who saves."""
        return (
            f"no keeper of staged checkpoints on this host, the trainers save by themselves: "
            f"{self.reason}"
        )


@dataclass(frozen=True, slots=True)
class DaemonAbandoned(Event):
    """The agent leaves before the keeper has ended: the time of a stop is over."""

    level: ClassVar[Level] = Level.WARNING
    pid: int
    linger_seconds: float

    def line(self) -> str:
        """Say what may be missing, and how long it may still come."""
        return (
            f"the keeper (pid {self.pid}) may still have a save in flight: it goes on by itself "
            f"for up to {self.linger_seconds:g} s, if this host lives that long; a save that does "
            "not land is lost, and those before it are intact"
        )


class DaemonSupervisor:
    """Keeps one keeper running across the lives of the workers.

    The keeper's standard input is a pipe that only this process holds: when it ends, however
    it ends, the keeper lets the saves in flight land and leaves.

    Args:
        folder: for the socket; nobody else may enter it.
        wishes: how to start it.
        linger_seconds: how long a save in flight may take once everything else has ended.
        emit: where facts go.
    """

    def __init__(
        self, folder: Path, wishes: DaemonOptions, linger_seconds: float, emit: Emitter
    ) -> None:
        self.path = "" if wishes.host_bytes_max < 0 else str(folder / "keeper")
        self._linger_seconds = linger_seconds
        self._emit = emit
        self._argv = [
            sys.executable,
            "-P",
            "-m",
            "resilient.checkpoint.daemon.server",
            "--socket",
            self.path,
        ]
        self._argv += ["--listen", wishes.listen, "--linger-seconds", str(linger_seconds)]
        self._argv += ["--host-bytes-max", str(wishes.host_bytes_max)]
        self._argv += ["--ranks", str(wishes.ranks), *(["--auto"] if wishes.is_auto else [])]
        self._process: subprocess.Popen[bytes] | None = None
        if wishes.why_not:
            emit(DaemonUnavailable(wishes.why_not))

    @property
    def pid(self) -> int:
        """The keeper's process, 0 when there is none."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start a keeper unless one runs; does not wait until it is ready."""
        if not self.path or self._is_running("another is started"):
            return
        Path(self.path).unlink(missing_ok=True)
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The terminal's and the job's signals are for the workers.
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ready(self) -> None:
        """Wait until the keeper can be asked; one that cannot start is no reason not to train.

        That one is told once, and not tried again.
        """
        if self._process and self._process.stdout and not self._process.stdout.closed:
            # It says one line and then nothing, or ends.
            readable, _, _ = select.select([self._process.stdout], [], [], _READY_SECONDS)
            said = os.read(self._process.stdout.fileno(), 1 << 12) if readable else b"ready"
            self._process.stdout.close()
            if said.strip() != b"ready":
                self._give_up(said.decode(errors="replace").strip())

    def stop(self, within_seconds: float | None = None) -> None:
        """Let the save in flight land, at most for the grace, and leave nothing behind.

        Args:
            within_seconds: what a request to stop leaves for this. The keeper then goes on
                without being watched, as long as it may linger and this host lives.
        """
        process, self._process = self._process, None
        if process is None:
            return
        _hang_up(process)
        most_seconds = self._linger_seconds + _MARGIN_SECONDS
        try:
            process.wait(most_seconds if within_seconds is None else max(0.0, within_seconds))
        except subprocess.TimeoutExpired:
            if within_seconds is not None:
                self._emit(DaemonAbandoned(process.pid, self._linger_seconds))
                return
            process.kill()
            process.wait()
        if process.returncode:
            self._emit(DaemonExited(process.returncode, "a save in flight may not have landed"))
            sweep()

    def _give_up(self, reason: str) -> None:
        process, self._process, self.path = self._process, None, ""
        assert process is not None, "it was started"  # noqa: S101
        _hang_up(process)
        status = process.wait()
        self._emit(DaemonUnavailable(reason or f"it ended with {status}"))

    def _is_running(self, follows: str) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        _hang_up(self._process)
        self._process = None
        self._emit(DaemonExited(status, follows))
        return False


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close its pipes: a keeper that still runs takes that for a goodbye."""
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


AUTO, NONE = 0, -1
LEAST_BYTES = 16 << 20
"""With less the machine is too small for a keeper by default."""
AUTO_SHARE = 2
"""By default a keeper takes at most one half of the memory that the machine has left."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {
    f"{letter}i{b}": 1024**power for power, letter in enumerate("kmgt", 1) for b in ("", "b")
}


def parse_host_bytes(text: str) -> int:
    """Return how many bytes a user asks for: ``auto``, ``none``, or a size such as ``8GiB``.

    Plain numbers are bytes, ``0`` is ``auto`` and ``-1`` is ``none``.

    Raises:
        ConfigError: it is none of these.
    """
    word = text.strip().lower()
    named = {"auto": AUTO, "0": AUTO, "none": NONE, "-1": NONE}.get(word)
    if named is not None:
        return named
    found = _SIZE.fullmatch(word)
    size_bytes = int(float(found[1]) * _UNITS.get(found[2], 0)) if found else 0
    if not size_bytes:
        raise ConfigError(
            f"--host-bytes-max {text!r} is neither auto nor none nor a size",
            hint="for example --host-bytes-max 8GiB",
        )
    return size_bytes


def resolve_memory_limit(wishes: DaemonOptions, root: Path = ROOT) -> DaemonOptions:
    """Return the wishes with the memory that there is for them.

    Args:
        wishes: with what the user asked for.
        root: where shared memory lies.

    Returns:
        With a positive bound; or with none, and the reason if it was left to the machine.

    Raises:
        ConfigError: a size was asked for that this host has not.
    """
    if wishes.host_bytes_max < 0:
        return wishes
    shared_bytes, left_bytes, numbers = _look(root)
    is_auto = wishes.host_bytes_max == AUTO
    granted_bytes = wishes.host_bytes_max or min(shared_bytes, left_bytes // AUTO_SHARE)
    least_bytes = LEAST_BYTES if is_auto else granted_bytes
    if least_bytes <= granted_bytes <= min(shared_bytes, left_bytes):
        return replace(wishes, host_bytes_max=granted_bytes, is_auto=is_auto)
    if is_auto:
        reason = f"{numbers}, and less than {LEAST_BYTES} are not worth it"
        return replace(wishes, host_bytes_max=NONE, why_not=reason)
    raise ConfigError(
        f"--host-bytes-max: {granted_bytes} bytes are too many: {numbers}",
        hint="leave --host-bytes-max out, or give none to do without a keeper",
    )


def _look(root: Path) -> tuple[int, int, str]:
    """Return how much shared memory is free and how much memory is left, and the same in words."""
    if not root.is_dir():
        return 0, 0, f"there is no {root}"
    shared_bytes, left_bytes = free_bytes(root), available_memory_bytes()
    numbers = f"{root} has {shared_bytes} bytes free and the machine {left_bytes} bytes of memory"
    return shared_bytes, sys.maxsize if left_bytes is None else left_bytes, numbers
