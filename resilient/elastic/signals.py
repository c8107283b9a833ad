"""Signals to the agent become a value that its loop polls."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from resilient.distributed.stop_request import StopRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.clock import Clock

_ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
# One order often arrives twice: to us, and through a wrapper that got it as well.
_SAME_ORDER_SECONDS = 0.5
_WAIT_SECONDS = 0.1
_GRACE_SECONDS = 25.0
_END_SECONDS = 2.0


class StopInterrupt(BaseException):
    """A stop was asked for while nothing but waiting went on."""


class StopSignals:
    """Remembers who asked to stop, and until when.

    SIGTERM, SIGINT and SIGHUP are orders: the first asks for a graceful stop and the second
    for an immediate one. SIGUSR1 and SIGUSR2 are preemption notices: they ask for the same
    graceful stop and never for more. What is told by another thread is one of those too.

    Args:
        clock: tells two orders from one that came twice.
        grace_seconds: what a stop may take if only a signal asks for it.

    Attributes:
        asked_by: number of the first signal, 0 when nobody asked.
        is_urgent: whether a second order came.
        request: why, and until when; None while nobody asked.
        end_seconds: when this host goes, on the monotonic clock, if somebody knows.
    """

    def __init__(self, clock: Clock, grace_seconds: float = _GRACE_SECONDS) -> None:
        self.asked_by = 0
        self.is_urgent = False
        self.request: StopRequest | None = None
        self.end_seconds: float | None = None
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._told: StopRequest | None = None
        self._ordered_at_seconds: float | None = None
        self._may_interrupt = False

    @contextmanager
    def listening(self, heard: Sequence[int] | None = None) -> Iterator[None]:
        """Handle the signals inside; what was ignored before (nohup) stays ignored.

        Main thread only.

        Args:
            heard: signals that came before, to whoever listened then; looked at once we do.
        """
        before = {
            number: signal.getsignal(number)
            for number in (*_ORDERS, *_NOTICES)
            if signal.getsignal(number) != signal.SIG_IGN or number in _NOTICES
        }
        for number in before:
            signal.signal(number, self._heard)
        for early in heard or ():
            self._heard(early, None)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def tell(self, request: StopRequest) -> None:
        """Ask to stop, from any thread, while somebody listens.

        The main thread hears it as a signal, so that a wait for other nodes ends with it as well.
        """
        self._told = request
        signal.pthread_kill(_main_thread(), signal.SIGUSR2)

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

    def left_seconds(self) -> float | None:
        """Return what a stop leaves once the workers are gone, None while nobody asked.

        Nothing if it is urgent, and else at least the 2 s that a notice holds back.
        """
        if self.request is None:
            return None
        left_seconds = self.request.left_seconds(self._clock.monotonic_seconds())
        return 0.0 if self.is_urgent else max(_END_SECONDS, left_seconds)

    def wait(self, seconds: float) -> bool:
        """Wait for ``seconds``; False, at once, when somebody asks to stop or has asked."""
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        while not self.asked_by and self._clock.monotonic_seconds() < deadline_seconds:
            self._clock.sleep(min(_WAIT_SECONDS, seconds))
        return not self.asked_by

    def _heard(self, number: int, _frame: Any) -> None:
        now_seconds = self._clock.monotonic_seconds()
        if number in _ORDERS:
            if self._ordered_at_seconds is None:
                self._ordered_at_seconds = now_seconds
            elif now_seconds - self._ordered_at_seconds > _SAME_ORDER_SECONDS:
                self.is_urgent = True
        asked = self._asked(number, now_seconds)
        self.request = self.request.within(asked) if self.request else asked
        self.asked_by = self.asked_by or number
        self._interrupt_if_asked()

    def _asked(self, number: int, now_seconds: float) -> StopRequest:
        """Return what a signal asks for: a notice may come long before the end that it is of."""
        told, self._told = self._told, None
        if told is not None:
            return told
        reason = signal.Signals(number).name
        end_seconds = self.end_seconds
        if number in _NOTICES and end_seconds is not None and end_seconds > now_seconds:
            return StopRequest(reason, end_seconds)
        # A person at a terminal means the run; who takes one host away sends the others.
        is_for_all = number == signal.SIGINT
        return StopRequest(reason, now_seconds + self._grace_seconds, is_for_all)

    def _interrupt_if_asked(self) -> None:
        if self._may_interrupt and self.asked_by:
            # Once: the way out must not be interrupted again.
            self._may_interrupt = False
            raise StopInterrupt


def _main_thread() -> int:
    identity = threading.main_thread().ident
    assert identity is not None, "it has started"  # noqa: S101
    return identity
