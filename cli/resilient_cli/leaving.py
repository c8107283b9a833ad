"""The end of the process, whose exit code must stay the one that was decided."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress


class Ending:
    """Ends the process before the interpreter takes itself down, where threads are left.

    A thread that nobody waits for may be in the code of a library, asking a host that does not
    answer. When it comes back while the interpreter goes down, the thread is ended there and then;
    C++ and Rust take that for an error and abort, and whoever started this process sees SIGABRT
    where the work was done.

    Attributes:
        status: the exit code; None when the process ends in another way, which stays as it is.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        # The first that is registered runs last: what others clean up is clean by then.
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.status is None or threading.active_count() == 1:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)
