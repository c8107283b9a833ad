"""Supervisor of this host's saver daemon, and the memory limit of the daemon.

The saver daemon is a process that writes checkpoints in the background.
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
    """The saver daemon of this host ended; until it runs again, the trainers persist saves."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = "the saver daemon ended with {status}: {follows}"
    status: int
    follows: str


@dataclass(frozen=True, slots=True)
class DaemonUnavailable(Event):
    """This host has no saver daemon: saves in flight are lost when trainers die."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "no saver daemon on this host, the trainers save by themselves: {reason}"
    )
    reason: str


@dataclass(frozen=True, slots=True)
class DaemonAbandoned(Event):
    """The agent exits before the saver daemon, because the time of a stop is over."""

    level: ClassVar[Level] = Level.WARNING
    template: ClassVar[str] = (
        "the saver daemon (pid {pid}) may still have a save in flight: it continues for up to "
        "{linger_seconds:g} s, if this host stays up. A save that is not committed in that time "
        "is lost, and earlier checkpoints are intact"
    )
    pid: int
    linger_seconds: float


class DaemonSupervisor:
    """Supervisor that keeps one saver daemon running across attempts.

    The daemon's standard input is a pipe whose other end only this process has open. When this
    process ends in any way, the daemon commits the saves in flight and exits.

    Args:
        folder: Private folder for the socket.
        options: Start options of the daemon.
        linger_seconds: Time for a save in flight after everything else has ended.
        emit: Listener for events.
    """

    def __init__(
        self, folder: Path, options: DaemonOptions, linger_seconds: float, emit: Emitter
    ) -> None:
        self.path = "" if options.host_bytes_max < 0 else str(folder / "keeper")
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
        self._argv += ["--listen", options.listen, "--linger-seconds", str(linger_seconds)]
        self._argv += ["--host-bytes-max", str(options.host_bytes_max)]
        self._argv += ["--ranks", str(options.ranks), *(["--auto"] if options.is_auto else [])]
        self._process: subprocess.Popen[bytes] | None = None
        if options.why_not:
            emit(DaemonUnavailable(options.why_not))

    @property
    def pid(self) -> int:
        """Process id of the daemon, 0 without one."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start a daemon unless one runs, without waiting until it is ready."""
        if not self.path or self._is_running("another daemon is started"):
            return
        Path(self.path).unlink(missing_ok=True)
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals of the terminal and the job are for the workers only.
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ready(self) -> None:
        """Wait until the daemon accepts requests; if it fails, training continues without a daemon.

        The failure is reported once, and the start is not retried.
        """
        if self._process and self._process.stdout and not self._process.stdout.closed:
            # The daemon prints one line, or exits.
            readable, _, _ = select.select([self._process.stdout], [], [], _READY_SECONDS)
            output = os.read(self._process.stdout.fileno(), 1 << 12) if readable else b"ready"
            self._process.stdout.close()
            if output.strip() != b"ready":
                self._give_up(output.decode(errors="replace").strip())

    def stop(self, within_seconds: float | None = None) -> None:
        """Wait for the commit of the save in flight, at most for the linger time, and clean up.

        Args:
            within_seconds: Time that a stop request leaves for the wait. Afterwards the daemon
                continues unsupervised, at most for its linger time and while this host runs.
        """
        process, self._process = self._process, None
        if process is None:
            return
        _close_pipes(process)
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
            self._emit(DaemonExited(process.returncode, "a save in flight may not be committed"))
            sweep()

    def _give_up(self, reason: str) -> None:
        process, self._process, self.path = self._process, None, ""
        assert process is not None, "the daemon was started"  # noqa: S101
        _close_pipes(process)
        status = process.wait()
        self._emit(DaemonUnavailable(reason or f"the daemon ended with {status}"))

    def _is_running(self, follows: str) -> bool:
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return True
        _close_pipes(self._process)
        self._process = None
        self._emit(DaemonExited(status, follows))
        return False


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close the daemon's pipes: a running daemon takes the closed pipe as a request to exit."""
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


AUTO, NONE = 0, -1
AUTO_BYTES_MIN = 16 << 20
"""Smallest memory for a daemon that the user did not ask for."""
AUTO_SHARE = 2
"""Divisor of the available memory: by default a daemon takes at most one half."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {
    f"{letter}i{b}": 1024**power for power, letter in enumerate("kmgt", 1) for b in ("", "b")
}


def parse_host_bytes(text: str) -> int:
    """Parse a memory option: ``auto``, ``none``, or a size such as ``8GiB``.

    Plain numbers are bytes, ``0`` is ``auto`` and ``-1`` is ``none``.

    Raises:
        ConfigError: The text has none of these forms.
    """
    word = text.strip().lower()
    limit = {"auto": AUTO, "0": AUTO, "none": NONE, "-1": NONE}.get(word)
    if limit is not None:
        return limit
    match = _SIZE.fullmatch(word)
    size_bytes = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not size_bytes:
        raise ConfigError(
            f"--host-bytes-max {text!r} is not auto, none or a size",
            hint="for example --host-bytes-max 8GiB",
        )
    return size_bytes


def resolve_memory_limit(options: DaemonOptions, root: Path = ROOT) -> DaemonOptions:
    """Return the options with a memory limit that this host can provide.

    Args:
        options: Options of the user.
        root: Folder of shared memory.

    Returns:
        Options with a positive limit. If the user set no limit and memory is short, the options
        disable the daemon and name the reason.

    Raises:
        ConfigError: The user asked for more memory than this host has.
    """
    if options.host_bytes_max < 0:
        return options
    shared_bytes, available_bytes, numbers = _measure_memory(root)
    is_auto = options.host_bytes_max == AUTO
    granted_bytes = options.host_bytes_max or min(shared_bytes, available_bytes // AUTO_SHARE)
    least_bytes = AUTO_BYTES_MIN if is_auto else granted_bytes
    if least_bytes <= granted_bytes <= min(shared_bytes, available_bytes):
        return replace(options, host_bytes_max=granted_bytes, is_auto=is_auto)
    if is_auto:
        reason = f"{numbers}, less than the minimum of {AUTO_BYTES_MIN}"
        return replace(options, host_bytes_max=NONE, why_not=reason)
    raise ConfigError(
        f"--host-bytes-max: {granted_bytes} bytes are too many: {numbers}",
        hint="omit --host-bytes-max, or give none to train without a saver daemon",
    )


def _measure_memory(root: Path) -> tuple[int, int, str]:
    """Return free shared memory and available memory in bytes, and both as text."""
    if not root.is_dir():
        return 0, 0, f"{root} does not exist"
    shared_bytes, available_bytes = free_bytes(root), available_memory_bytes()
    numbers = (
        f"{root} has {shared_bytes} bytes free and the machine {available_bytes} bytes of memory"
    )
    return shared_bytes, sys.maxsize if available_bytes is None else available_bytes, numbers
