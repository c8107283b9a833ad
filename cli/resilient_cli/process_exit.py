"""Early signals; keep the decided exit code.

Signals that come while `resilient train` is still importing: remembered, and heard later.

Python itself needs some hundredths of a second before this is loaded, and the rest of the program
some tenths: until then SIGTERM would end it as if it were any program. Nothing is imported here
but what the interpreter has anyway.

The end of the process, whose exit code must stay the one that was decided.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WITH_VALUES = frozenset({"--format", "--timeout"})
"""Global options whose value is a word of its own, and no command."""

heard: list[int] = []
"""The signals that came, in their order; whoever takes over hears them as well."""
_before: dict[int, Any] = {}


def record_early_signals(arguments: Sequence[str]) -> None:
    """Remember signals from here on if ``arguments`` say ``train``.

    What is ignored (nohup) stays ignored. Main thread only.
    """
    if command_of(arguments) != "train":
        return
    for number in _NUMBERS:
        before = signal.getsignal(number)
        if before != signal.SIG_IGN:
            _before[number] = before
            signal.signal(number, _remember)


def command_of(arguments: Sequence[str]) -> str:
    """Return the command that is called, empty if none is."""
    is_value = False
    for word in arguments:
        if not is_value and not word.startswith("-"):
            return word
        is_value = word in WITH_VALUES
    return ""


def stop_listening() -> None:
    """Let signals do what they did before, those too that have come meanwhile."""
    for number, handler in _before.items():
        signal.signal(number, handler)
    _before.clear()
    for number in heard:
        signal.raise_signal(number)


def _remember(number: int, _frame: object) -> None:
    heard.append(number)


class ExitGuard:
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
