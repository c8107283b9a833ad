"""Persisting lets training go first: it may take the cores that training leaves.

Only a process steps back. A thread of the trainer that the kernel keeps waiting may hold the
interpreter's lock, and then training waits with it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NICENESS = 10


def step_back() -> None:
    """Let other processes go first; for a process that does nothing but persist."""
    with suppress(OSError):
        os.nice(_NICENESS)
    # A session of its own may count as a user of its own, with a fair share however nice. One that
    # is shared is the trainers' too, and whoever else's works there: it stays as it is.
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICENESS))
