"""Early signals of ``resilient train``, and the exit code of a process with leftover threads.

Python loads this module some hundredths of a second after its start. The rest of the program is
loaded some tenths of a second later. Without this module, SIGTERM would end the program at once
during this time. The module therefore records signals, and the program handles the recorded signals
later. To load early, this module imports only a few modules of the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WITH_VALUES = frozenset({"--format", "--timeout"})
"""Global options whose value is a separate word, which must not be taken for the command."""

pending_signals: list[int] = []
"""Recorded signals, in order; the agent or :func:`stop_listening` handles them later."""
_previous_handlers: dict[int, Any] = {}


def record_early_signals(arguments: Sequence[str]) -> None:
    """Record signals from now on if ``arguments`` call ``train``.

    Ignored signals (nohup) stay ignored. Main thread only.
    """
    if command_of(arguments) != "train":
        return
    for number in _NUMBERS:
        previous_handler = signal.getsignal(number)
        if previous_handler != signal.SIG_IGN:
            _previous_handlers[number] = previous_handler
            signal.signal(number, _record_signal)


def command_of(arguments: Sequence[str]) -> str:
    """Return the name of the called command; empty if there is none."""
    is_value = False
    for word in arguments:
        if not is_value and not word.startswith("-"):
            return word
        is_value = word in WITH_VALUES
    return ""


def stop_listening() -> None:
    """Restore the previous handlers, and raise the recorded signals again."""
    for number, handler in _previous_handlers.items():
        signal.signal(number, handler)
    _previous_handlers.clear()
    for number in pending_signals:
        signal.raise_signal(number)


def _record_signal(number: int, _frame: object) -> None:
    pending_signals.append(number)


class ExitGuard:
    """Exit hook that ends the process before the interpreter shuts down, if threads are left.

    Such a thread may wait inside a library for a host that does not answer. If the library returns
    during the shutdown, the interpreter ends the thread at once. C++ and Rust treat this end
    as an error and abort. The parent process then sees SIGABRT although the command has completed.

    Attributes:
        status: Exit code; with None the hook does nothing.
    """

    def __init__(self) -> None:
        import atexit  # imported late, because signals are recorded before other imports

        self.status: int | None = None
        # The hook registered first runs last, after the cleanup of all other hooks.
        atexit.register(self._end_process)

    def _end_process(self) -> None:
        import threading

        if self.status is None or threading.active_count() == 1:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.status)
