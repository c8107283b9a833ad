"""Shift of the wall clock of one job, by a small preloaded library (``clock.c``).

Only the time that processes read is shifted. File timestamps come from the kernel and are not
shifted, as if a file server with its own clock set them. Monotonic clocks are unchanged, as they
are when a real clock jumps.
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
_PROBE_SCRIPT = "import time; time.sleep(0.001); print(time.time())"


class MovableClock:
    """Wall clock of all processes started with ``environ``.

    Args:
        folder: Existing folder for the library and the offset of the clock.

    Attributes:
        moved_seconds: Total shift.

    Raises:
        ConfigError: The library cannot be built.
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
        """Variables for a process; its children inherit them."""
        preloaded_libraries = os.environ.get("LD_PRELOAD", "")
        return {
            "LD_PRELOAD": f"{self._library} {preloaded_libraries}".strip(),
            "RESILIENT_CHAOS_CLOCK": str(self._offset),
        }

    def move(self, seconds: float) -> None:
        """Shift the clock forward or back; it continues from there."""
        self.moved_seconds += seconds
        # Write in place, because the file is mapped. A write of eight bytes is seen as a whole.
        with self._offset.open("r+b", buffering=0) as file:
            file.write(_OFFSET.pack(round(self.moved_seconds * _NANOSECONDS)))


def why_not_moving() -> str:
    """Return the reason why clocks cannot be shifted here, empty if they can."""
    if shutil.which("cc") is None:
        return "this fault builds a small library with a C compiler, and `cc` is not installed"
    with tempfile.TemporaryDirectory(prefix="resilient-chaos-") as folder:
        try:
            clock = MovableClock(Path(folder))
        except ConfigError as error:
            return error.message
        clock.move(_PROBE_SECONDS)
        answer = _run(sys.executable, "-c", _PROBE_SCRIPT, environ=clock.environ)
        moved_seconds = 0.0
        with suppress(ValueError):
            moved_seconds = float(answer.stdout) - _now_seconds()
    if abs(moved_seconds - _PROBE_SECONDS) < _PROBE_SLACK_SECONDS:
        return ""
    return (
        f"`{sys.executable}` does not preload the library: "
        f"{answer.stderr.strip()[-200:] or answer.stdout}"
    )


def _now_seconds() -> float:
    return datetime.fromisoformat(SystemClock().now_iso()).timestamp()


def _build(library: Path) -> str:
    """Compile the library; return the reason of a failure, empty on success."""
    command = ("cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl")
    process = _run(*command)
    return f"`{' '.join(command)}`: {process.stderr.strip()[-400:]}" * bool(process.returncode)


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
