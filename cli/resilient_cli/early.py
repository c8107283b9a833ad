"""Signals that come while `resilient train` is still importing: remembered, and heard later.

Python itself needs some hundredths of a second before this is loaded, and the rest of the program
some tenths: until then SIGTERM would end it as if it were any program. Nothing is imported here
but what the interpreter has anyway.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WITH_VALUES = frozenset({"--format", "--timeout"})
"""Global options whose value is a word of its own, and no command."""

heard: list[int] = []
"""The signals that came, in their order; whoever takes over hears them as well."""
_before: dict[int, Any] = {}


def listen(arguments: Sequence[str]) -> None:
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
