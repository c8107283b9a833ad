"""What harms files and what they lie on: a flipped bit, a full disk, an fsync that fails."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from resilient.testing.chaos.job import WentWrong
from resilient.testing.chaos.processes import is_running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from random import Random

    from resilient.clock import Clock

_SLICE_SECONDS = 0.1
_BLOCK = bytes(1 << 16)


def flip_bit(path: Path, random: Random) -> None:
    """Change one bit of a file where it lies."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        bit = random.randrange(8 * size)
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([byte]))


@contextmanager
def full(ballast: Path) -> Iterator[None]:
    """Leave no free byte in the file system of ``ballast`` inside."""
    try:
        with ballast.open("wb", buffering=0) as file:
            size = len(_BLOCK)
            while size:
                try:
                    file.write(_BLOCK[:size])
                except OSError:
                    # Smaller and smaller, until not even one byte fits.
                    size //= 2
        yield
    finally:
        ballast.unlink(missing_ok=True)


@contextmanager
def broken_syncs(pids: list[int], clock: Clock, within_seconds: float = 20.0) -> Iterator[None]:
    """Let fsync fail with EIO in these processes, and in what they start, inside.

    Raises:
        WentWrong: they cannot be traced.
    """
    calls = "fsync,fdatasync"
    command = ["strace", "-qq", "-f", "-o", "/dev/null", "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:error=EIO"]
    for pid in pids:
        command += ["-p", str(pid)]
    tracer = subprocess.Popen(  # noqa: S603 - a fixed program
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline_seconds = clock.monotonic_seconds() + within_seconds
        while not all(_is_traced(pid) for pid in pids if is_running(pid)):
            if tracer.poll() is not None or clock.monotonic_seconds() > deadline_seconds:
                raise WentWrong("strace does not get hold of the job")
            clock.sleep(_SLICE_SECONDS)
        yield
    finally:
        # It lets go of whom it traces, and they go on.
        tracer.terminate()
        tracer.wait()


def _is_traced(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:  # noqa: PTH123
            return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in file)
    except OSError:
        return True
