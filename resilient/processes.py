"""Identity and liveness of processes on this host."""

from __future__ import annotations

import atexit
import os
import socket
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resilient.clock import boot_name

_START_FIELD = 19
"""Field of /proc/PID/stat after the name, from 0: start time in clock ticks since the boot."""

_TEXT_LENGTH_MAX = 300
_NUMBER_END = 1 << 63
_FIELDS = {"host": str, "pid": int, "boot": str, "start_ticks": int}


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of one process, distinct from a later process with the same pid.

    Attributes:
        host: Name of its machine.
        pid: Process id on that machine.
        boot: Name of the machine's boot; empty where the system does not provide it.
        start_ticks: Start time in clock ticks since that boot.
    """

    host: str
    pid: int
    boot: str
    start_ticks: int

    @property
    def is_running_here(self) -> bool:
        """True if the process is proven to run on this host; False does not prove its end."""
        return bool(self.boot) and identify(self.pid) == self

    @property
    def is_of_this_boot(self) -> bool:
        """True if the process ran on this host since its boot, so its end is visible here."""
        return bool(self.boot) and (self.host, self.boot) == (socket.gethostname(), boot_name())

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a generation record."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Any) -> ProcessIdentity:
        """Return the identity that ``to_json`` described.

        Raises:
            ValueError: A field is missing, of another type or out of bounds.
        """
        if not isinstance(fields, dict):
            raise ValueError("`process` is not an object")  # noqa: TRY004 - as all readers of records
        if any(type(fields.get(name)) is not kind for name, kind in _FIELDS.items()):
            raise ValueError("`process` lacks a field, or a field has another type")
        identity = ProcessIdentity(**{name: fields[name] for name in _FIELDS})
        if any(len(text) > _TEXT_LENGTH_MAX for text in (identity.host, identity.boot)):
            raise ValueError("`process` has a text that is too long or not a text")
        if any(not 0 <= number < _NUMBER_END for number in (identity.pid, identity.start_ticks)):
            raise ValueError("`process` has a number out of bounds")
        return identity


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process of this host, None without one or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *fields = text.rpartition(")")[2].split()
        start_ticks = int(fields[_START_FIELD - 1])
    except (OSError, ValueError, IndexError):
        return None
    if state in "ZX":
        return None
    return ProcessIdentity(socket.gethostname(), pid, boot_name(), start_ticks)


def identify_self() -> ProcessIdentity | None:
    """Return the identity of this process."""
    return identify(os.getpid())


def release_claim(token: str) -> None:
    """Record on this host that a living process no longer writes under its claim.

    The note stays in the folder for temporary files until the process ends. If the note cannot be
    written, the host treats the process as a writer while the process runs.

    Args:
        token: Token of the generation that the process claimed.
    """
    note = _note_of(token)
    with suppress(OSError):
        note.touch()
        atexit.register(_remove, note)


def is_released(token: str) -> bool:
    """Return whether the process that made a claim has released it on this host."""
    return token.isalnum() and _note_of(token).exists()


def _note_of(token: str) -> Path:
    return Path(tempfile.gettempdir(), f"resilient-released-{token}")


def _remove(note: Path) -> None:
    with suppress(OSError):
        note.unlink()
