"""Signals to the agent become a value that its loop polls."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.clock import Clock

_ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# One order often arrives twice: to us, and through a wrapper that got it as well.
_SAME_ORDER_SECONDS = 0.5


class StopAsked(BaseException):
    """A stop was asked for while nothing but waiting went on."""


class Stops:
    """Remembers who asked to stop.

    SIGTERM, SIGINT and SIGHUP are orders: the first asks for a graceful stop and the second
    for an immediate one. SIGUSR1 and SIGUSR2 are preemption notices: they ask for the same
    graceful stop and never for more.

    Args:
        clock: tells two orders from one that came twice.

    Attributes:
        asked_by: number of the first signal, 0 when nobody asked.
        is_urgent: whether a second order came.
    """

    def __init__(self, clock: Clock) -> None:
        self.asked_by = 0
        self.is_urgent = False
        self._clock = clock
        self._ordered_at_seconds: float | None = None
        self._may_interrupt = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside; what was ignored before (nohup) stays ignored.

        Main thread only.
        """
        before = {
            number: signal.getsignal(number)
            for number in (*_ORDERS, *_NOTICES)
            if signal.getsignal(number) != signal.SIG_IGN or number in _NOTICES
        }
        for number in before:
            signal.signal(number, self._heard)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a stop raises StopAsked: for waits that do not poll.

        Raises:
            StopAsked: a stop was asked for before or is asked for inside.
        """
        self._may_interrupt = True
        try:
            self._interrupt_if_asked()
            yield
        finally:
            self._may_interrupt = False

    def _heard(self, number: int, _frame: Any) -> None:
        if number in _ORDERS:
            now_seconds = self._clock.monotonic_seconds()
            if self._ordered_at_seconds is None:
                self._ordered_at_seconds = now_seconds
            elif now_seconds - self._ordered_at_seconds > _SAME_ORDER_SECONDS:
                self.is_urgent = True
        self.asked_by = self.asked_by or number
        self._interrupt_if_asked()

    def _interrupt_if_asked(self) -> None:
        if self._may_interrupt and self.asked_by:
            # Once: the way out must not be interrupted again.
            self._may_interrupt = False
            raise StopAsked
