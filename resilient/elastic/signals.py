"""Stop signals and preemption notices to the agent.

The agent is the process that starts and watches the workers of a host. A signal handler only
records the request of a signal. The loop of the agent then polls this request.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from resilient.distributed.stop_request import StopRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from resilient.clock import Clock

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# The same order often arrives twice: directly, and from a wrapper that received it too.
_DUPLICATE_SECONDS = 0.5
_WAIT_SECONDS = 0.1
_GRACE_SECONDS = 25.0
_END_SECONDS = 2.0


class StopInterrupt(BaseException):
    """A stop request interrupted a wait that does not poll."""


class StopSignals:
    """Stop requests from signals and threads, with their deadline.

    SIGTERM, SIGINT and SIGHUP are stop orders. The first order requests a graceful stop, the second
    an immediate stop. SIGUSR1 and SIGUSR2 are preemption notices, which always request a graceful
    stop. A request from another thread counts as a notice.

    Args:
        clock: Clock that distinguishes two orders from one order that arrived twice.
        grace_seconds: Time for a stop if only a signal asks for it.

    Attributes:
        asked_by: Number of the first signal, 0 without one.
        is_urgent: Whether a second order came.
        request: Reason and deadline of the stop; None without a request.
        end_seconds: Time at which this host is taken away, monotonic seconds, if known.
    """

    def __init__(self, clock: Clock, grace_seconds: float = _GRACE_SECONDS) -> None:
        self.asked_by = 0
        self.is_urgent = False
        self.request: StopRequest | None = None
        self.end_seconds: float | None = None
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._pending_request: StopRequest | None = None
        self._first_stop_at_seconds: float | None = None
        self._may_interrupt = False

    @contextmanager
    def listening(self, signals: Sequence[int] | None = None) -> Iterator[None]:
        """Handle the signals inside the block; signals ignored before (nohup) stay ignored.

        Main thread only.

        Args:
            signals: Signals that an earlier handler received; processed at the start.
        """
        handlers_before = {
            number: signal.getsignal(number)
            for number in (*_STOP_SIGNALS, *_NOTICE_SIGNALS)
            if signal.getsignal(number) != signal.SIG_IGN or number in _NOTICE_SIGNALS
        }
        for number in handlers_before:
            signal.signal(number, self._handle_signal)
        for pending_signal in signals or ():
            self._handle_signal(pending_signal, None)
        try:
            yield
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)

    def request_stop(self, request: StopRequest) -> None:
        """Request a stop from any thread while the block of :meth:`listening` runs.

        The main thread receives the request as a signal, so the request also ends a wait for other
        nodes.
        """
        self._pending_request = request
        signal.pthread_kill(_main_thread(), signal.SIGUSR2)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise StopInterrupt for a stop inside the block, for waits that do not poll.

        Raises:
            StopInterrupt: A stop was requested before or inside the block.
        """
        self._may_interrupt = True
        try:
            self._interrupt_if_requested()
            yield
        finally:
            self._may_interrupt = False

    def left_seconds(self) -> float | None:
        """Return the seconds until the deadline of the stop; None without a request.

        Work after the end of the workers has this limit. The result is 0 for an urgent stop.
        Otherwise the result is at least 2 s, because a notice reserves this time.
        """
        if self.request is None:
            return None
        left_seconds = self.request.left_seconds(self._clock.monotonic_seconds())
        return 0.0 if self.is_urgent else max(_END_SECONDS, left_seconds)

    def wait(self, seconds: float) -> bool:
        """Wait for ``seconds``; return False at once if a stop is or was requested."""
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        while not self.asked_by and self._clock.monotonic_seconds() < deadline_seconds:
            self._clock.sleep(min(_WAIT_SECONDS, seconds))
        return not self.asked_by

    def _handle_signal(self, number: int, _frame: Any) -> None:
        now_seconds = self._clock.monotonic_seconds()
        if number in _STOP_SIGNALS:
            if self._first_stop_at_seconds is None:
                self._first_stop_at_seconds = now_seconds
            elif now_seconds - self._first_stop_at_seconds > _DUPLICATE_SECONDS:
                self.is_urgent = True
        request = self._request_of(number, now_seconds)
        self.request = self.request.within(request) if self.request else request
        self.asked_by = self.asked_by or number
        self._interrupt_if_requested()

    def _request_of(self, number: int, now_seconds: float) -> StopRequest:
        """Return the request of a signal; a notice may come long before the end of the host."""
        pending_request, self._pending_request = self._pending_request, None
        if pending_request is not None:
            return pending_request
        reason = signal.Signals(number).name
        end_seconds = self.end_seconds
        if number in _NOTICE_SIGNALS and end_seconds is not None and end_seconds > now_seconds:
            return StopRequest(reason, end_seconds)
        # SIGINT comes from a user at a terminal and is for the run. Others may be for one host.
        is_for_all = number == signal.SIGINT
        return StopRequest(reason, now_seconds + self._grace_seconds, is_for_all)

    def _interrupt_if_requested(self) -> None:
        if self._may_interrupt and self.asked_by:
            # Interrupt only once: the cleanup must not be interrupted again.
            self._may_interrupt = False
            raise StopInterrupt


def _main_thread() -> int:
    identity = threading.main_thread().ident
    assert identity is not None, "the handler is installed"  # noqa: S101
    return identity
