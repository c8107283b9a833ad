"""The time of day of one job alone: a small library that its processes preload (``clock.c``).

Only what the processes are told is moved. Files get their times from the kernel, as they do on a
file server, and clocks that only run forward are left alone, as they are when a real clock jumps.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from resilient.clock import SystemClock
from resilient.errors import ConfigError

_SOURCE = Path(__file__).parent / "clock.c"
_OFFSET = struct.Struct("=q")
_NANOSECONDS = 1e9
_BUILD_SECONDS = 120.0
_PROBE_SECONDS = 3600.0
_PROBE_SLACK_SECONDS = 600.0
_ASK = "import time; time.sleep(0.001); print(time.time())"


class MovableClock:
    """The time of day of whatever is started with ``environ``.

    Args:
        folder: an existing one, for the library and for how far the clock was moved.

    Attributes:
        moved_seconds: how far, in all.

    Raises:
        ConfigError: the library cannot be built.
    """

    def __init__(self, folder: Path) -> None:
        self.moved_seconds = 0.0
        self._library = folder / "chaos-clock.so"
        self._offset = folder / "chaos-clock.offset"
        problem = _build(self._library)
        if problem:
            raise ConfigError(f"no clock can be moved: {problem}")
        self._offset.write_bytes(_OFFSET.pack(0))

    @property
    def environ(self) -> dict[str, str]:
        """What a process must be started with; what it starts inherits it."""
        others = os.environ.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": f"{self._library} {others}".strip(),
            "RESILIENT_CHAOS_CLOCK": str(self._offset),
        }

    def move(self, seconds: float) -> None:
        """Let the clock jump, forward or back; it runs on from there."""
        self.moved_seconds += seconds
        # In place, since it is mapped; eight bytes at once are seen whole.
        with self._offset.open("r+b", buffering=0) as file:
            file.write(_OFFSET.pack(round(self.moved_seconds * _NANOSECONDS)))


def why_not_moving() -> str:
    """Return why no clock can be moved here, or nothing."""
    if shutil.which("cc") is None:
        return "it builds a small library with a C compiler, and `cc` is not installed"
    with tempfile.TemporaryDirectory(prefix="resilient-chaos-") as folder:
        try:
            clock = MovableClock(Path(folder))
        except ConfigError as error:
            return error.message
        clock.move(_PROBE_SECONDS)
        told = _run(sys.executable, "-c", _ASK, environ=clock.environ)
        moved_seconds = 0.0
        with suppress(ValueError):
            moved_seconds = float(told.stdout) - _now_seconds()
    if abs(moved_seconds - _PROBE_SECONDS) < _PROBE_SLACK_SECONDS:
        return ""
    return f"`{sys.executable}` preloads nothing: {told.stderr.strip()[-200:] or told.stdout}"


def _now_seconds() -> float:
    return datetime.fromisoformat(SystemClock().now_iso()).timestamp()


def _build(library: Path) -> str:
    """Compile the library; return why that failed, or nothing."""
    command = ("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl")
    done = _run(*command)
    return f"`{' '.join(command)}`: {done.stderr.strip()[-400:]}" * bool(done.returncode)


def _run(*command: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 - the compiler and ourselves
            command,
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
            env={**os.environ, **(environ or {})},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
