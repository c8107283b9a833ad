"""End a keeper that says nothing, so that it never goes on with what others do in its place.

A process that only sleeps would wake in the middle of a save that was persisted without it, put
its own files over those that are committed, and rotate by what it was told before it slept.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress

_GONE_SECONDS = 2.0


class KeeperProcess:
    """The very process that a number was, whoever has that number later.

    Args:
        pid: as this process sees it; 0 where it sees none.
    """

    def __init__(self, pid: int) -> None:
        self._handle: int | None = None
        with suppress(OSError):
            # Refused by kernels before Linux 5.3 and some sandboxes.
            self._handle = os.pidfd_open(pid)

    def end(self, within_seconds: float = _GONE_SECONDS) -> bool:
        """Kill it; say whether it is gone.

        Crash: it is gone or as it was.

        Args:
            within_seconds: how long it may take to go: in state D it does not.
        """
        if self._handle is None:
            return False
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except ProcessLookupError:
            return True
        except OSError:
            # Somebody else's process, or one that may not be signalled from here.
            return False
        gone = select.poll()
        gone.register(self._handle, select.POLLIN)
        return bool(gone.poll(within_seconds * 1000))

    def close(self) -> None:
        """Let the handle go."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
