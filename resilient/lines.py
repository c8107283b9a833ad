"""Lines that are written where nothing may come of a failure: to files, and to standard error."""

from __future__ import annotations

import errno
import os
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from resilient.showing import visible, without_secrets

if TYPE_CHECKING:
    from pathlib import Path

    from resilient.errors import ResilientError


class LineFile:
    """Appends lines to a file, and never fails: what cannot be written is dropped and counted.

    A full disk must not end a training whose checkpoints go elsewhere, or that was told to go on
    without them. Standard error hears when dropping begins and, with the count, when it is over.
    Each line is one write in append mode, so several processes may share the file.

    Args:
        path: the file; its folder is made if it can be.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dropped = 0
        # Events come from the thread that trains and from the one that saves.
        self._lock = threading.Lock()
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, line: str) -> None:
        """Write one line, or drop it."""
        with self._lock:
            try:
                _append(self._path, f"{line}\n".encode())
            except OSError as error:
                if self._dropped == 0:
                    why = error.strerror or type(error).__name__
                    say(
                        f"`{self._path}` cannot be written, its lines are dropped: {why}; training "
                        "and checkpoints are not affected; free some space: df -h"
                    )
                self._dropped += 1
                return
            if self._dropped:
                say(f"`{self._path}` is written again; lines dropped: {self._dropped}")
                self._dropped = 0


def _append(path: Path, line: bytes) -> None:
    """Write all of ``line`` or nothing of it."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        written = os.write(descriptor, line)
        if written == len(line):
            return
        # A full disk takes a part; it would spoil the next line, unless that is there already.
        end = os.lseek(descriptor, 0, os.SEEK_CUR)
        if os.fstat(descriptor).st_size == end:
            os.ftruncate(descriptor, end - written)
    finally:
        os.close(descriptor)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def say(text: str) -> None:
    """Write one line to standard error, or let it be."""
    # A program may have closed it, or have none.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"resilient: {visible(without_secrets(text))}\n")


def say_error(error: ResilientError) -> None:
    """Write to standard error how an error of ours ended the process, or let it be."""
    hint = f"\n  hint: {error.hint}" if error.hint else ""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(visible(without_secrets(f"{error.message}  [{error.code}]{hint}\n")))
