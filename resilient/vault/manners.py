"""Persisting lets training go first: it may take the cores that training leaves."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

_NICENESS = 10


def step_back() -> None:
    """Let other processes go first; for a process that does nothing but persist."""
    with suppress(OSError):
        os.nice(_NICENESS)
    # A session of its own may count as a user of its own, with a fair share however nice.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def step_back_alone() -> None:
    """Let the other threads of this process go first; on Linux a thread has its own niceness."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
