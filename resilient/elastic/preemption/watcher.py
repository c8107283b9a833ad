"""Watcher that polls each source of preemption notices in a thread, and reports to the agent.

The threads are daemon threads, so a metadata server that never answers delays neither training nor
the exit of the agent. A source that does not answer is polled again at growing intervals.
"""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING, Protocol

from resilient.distributed.stop_request import StopRequest
from resilient.elastic import events
from resilient.elastic.preemption.notice import (
    LEAD_SECONDS,
    Meaning,
    SourceGarbled,
    SourceLost,
    evaluate_notice,
    unix_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from resilient.clock import Clock
    from resilient.elastic.preemption.notice import Notice, NoticeSource
    from resilient.events import Emitter, Event

_PAUSE_SECONDS_MAX = 60.0
_DOUBLINGS_MAX = 8
_REPORTED_MAX = 100


class NoticeListener(Protocol):
    """Receiver of stop requests.

    Attributes:
        end_seconds: Time at which this host is taken away, monotonic seconds, once known.
    """

    end_seconds: float | None

    def request_stop(self, request: StopRequest) -> None:
        """Accept a stop request."""


class Watcher:
    """Watcher of all sources until one requires a stop.

    Args:
        sources: Sources to poll.
        stop_listener: Receiver of the first due request; called once, from a thread.
        clock: Clock for all times.
        emit: Listener for events.
        grace_seconds: Time for a stop if the end of the host is unknown.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        stop_listener: NoticeListener,
        clock: Clock,
        emit: Emitter,
        grace_seconds: float,
    ) -> None:
        self._sources = sources
        self._stop_listener = stop_listener
        self._clock = clock
        self._emit = emit
        self._grace_seconds = grace_seconds
        self._lead_seconds = max(LEAD_SECONDS, grace_seconds)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._sources_started: list[NoticeSource] = []
        self._first_polls = [threading.Event() for _ in sources]
        self._threads = [
            threading.Thread(target=self._watch, args=(source, polled), name="notice", daemon=True)
            for source, polled in zip(sources, self._first_polls, strict=True)
        ]

    def start(self) -> None:
        """Start polling."""
        if self._sources:
            self._emit(events.NoticeSourcesStarted(tuple(source.name for source in self._sources)))
        for thread in self._threads:
            thread.start()

    def wait_first_polls(self, seconds: float) -> None:
        """Wait until each source was polled once, ``seconds`` at most in total.

        A notice that already exists is then reported before the first worker starts.
        """
        deadline_seconds = self._clock.monotonic_seconds() + seconds
        for polled in self._first_polls:
            polled.wait(max(0.0, deadline_seconds - self._clock.monotonic_seconds()))

    def close(self) -> None:
        """Stop reporting notices; each thread ends after its current poll."""
        with self._lock:
            self._closing.set()
        for source in self._sources:
            source.close()

    def acknowledge(self) -> None:
        """Report to the source that requested the stop that all is saved."""
        for source in self._sources_started:
            try:
                source.acknowledge()
            except SourceLost as error:
                self._emit(events.NoticeAckFailed(source.name, str(error)))

    def _watch(self, source: NoticeSource, polled: threading.Event) -> None:
        poller = _SourcePoller(source, self._emit)
        pause_seconds = 0.0
        while not self._closing.wait(pause_seconds):
            pause_seconds = poller.ask(self._handle_notice)
            polled.set()

    def _handle_notice(self, poller: _SourcePoller, notice: Notice | None) -> None:
        now_seconds = unix_seconds(self._clock)
        verdict = evaluate_notice(notice, now_seconds, self._grace_seconds, self._lead_seconds)
        withdrawn_notice = poller.pending
        poller.pending = notice if verdict.meaning is Meaning.LATER else None
        if notice is None:
            if withdrawn_notice is not None:
                poller.emit_again(events.NoticeWithdrawn(withdrawn_notice.reason))
            return
        at_seconds = notice.at_seconds
        left_seconds = None if at_seconds is None else at_seconds - now_seconds
        if left_seconds is not None and not notice.is_advice:
            self._stop_listener.end_seconds = self._clock.monotonic_seconds() + left_seconds
        match verdict.meaning:
            case Meaning.ADVICE:
                poller.emit_once(notice.reason, events.PreemptionAdvised(notice.reason))
            case Meaning.STALE:
                poller.emit_once(
                    notice.reason, events.NoticeExpired(notice.reason, verdict.in_seconds)
                )
            case Meaning.LATER:
                poller.pause_seconds_max = verdict.in_seconds
                event = events.NoticeReceived(notice.reason, left_seconds, verdict.in_seconds)
                poller.emit_once(f"{notice.reason} at {at_seconds}", event)
            case Meaning.NOW:
                self._stop(poller.source, notice, left_seconds, verdict.left_seconds)

    def _stop(
        self,
        source: NoticeSource,
        notice: Notice,
        left_seconds: float | None,
        may_take_seconds: float,
    ) -> None:
        with self._lock:
            if self._closing.is_set() or self._sources_started:
                return
            self._sources_started.append(source)
            self._emit(events.NoticeReceived(notice.reason, left_seconds, 0.0))
            deadline_seconds = self._clock.monotonic_seconds() + may_take_seconds
            self._stop_listener.request_stop(
                StopRequest(notice.reason, deadline_seconds, notice.is_for_all)
            )


class _SourcePoller:
    """One source with the events already emitted for it."""

    def __init__(self, source: NoticeSource, emit: Emitter) -> None:
        self.source = source
        self.pending: Notice | None = None
        self.pause_seconds_max = _PAUSE_SECONDS_MAX
        self._emit = emit
        self._reported: set[str] = set()
        self._failures = 0
        self._random = Random(source.name)  # noqa: S311 - jitter

    def ask(self, consider: Callable[[_SourcePoller, Notice | None], None]) -> float:
        """Poll once, emit new events, and return the pause before the next poll."""
        every_seconds = self.source.every_seconds
        self.pause_seconds_max = _PAUSE_SECONDS_MAX
        try:
            notice = self.source.look()
        except SourceLost as error:
            self._failures += 1
            self.emit_once("lost", events.NoticeSourceLost(self.source.name, str(error)))
            doublings = min(self._failures, _DOUBLINGS_MAX)
            pause_seconds = max(every_seconds, 0.5) * 2.0**doublings
            return min(pause_seconds, _PAUSE_SECONDS_MAX) * self._random.uniform(0.7, 1.0)
        except SourceGarbled as error:
            self.emit_once(str(error), events.NoticeInvalid(self.source.name, str(error)))
            return max(every_seconds, 0.5)
        if self._failures:
            self._failures = 0
            self._reported.discard("lost")
            self._emit(events.NoticeSourceFound(self.source.name))
        consider(self, notice)
        return min(every_seconds, self.pause_seconds_max)

    def emit_once(self, key: str, event: Event) -> None:
        """Emit an event once per key."""
        if key not in self._reported and len(self._reported) < _REPORTED_MAX:
            self._reported.add(key)
            self._emit(event)

    def emit_again(self, event: Event) -> None:
        """Emit an event, and allow earlier events to be emitted again."""
        self._reported.clear()
        self._emit(event)
