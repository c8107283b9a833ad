"""What a stop leaves for what comes after the workers."""

import signal

from resilient.clock import SystemClock
from resilient.distributed.stop_request import StopRequest
from resilient.elastic.signals import StopSignals


class StillClock(SystemClock):
    def monotonic_seconds(self):
        return 100.0


def test_without_a_stop_nothing_is_short():
    assert StopSignals(StillClock()).left_seconds() is None


def test_what_is_left_is_that_of_the_deadline_and_never_less_than_what_a_notice_holds_back():
    stops = StopSignals(StillClock())
    stops.request = StopRequest("SIGTERM", 110.0)
    assert stops.left_seconds() == 10.0
    stops.request = StopRequest("SIGTERM", 90.0)
    assert stops.left_seconds() == 2.0


def test_an_urgent_stop_leaves_nothing():
    stops = StopSignals(StillClock())
    stops.request, stops.is_urgent = StopRequest("SIGTERM", 110.0), True
    assert stops.left_seconds() == 0.0


def test_what_was_heard_before_counts_once_somebody_listens():
    stops = StopSignals(SystemClock(), 5.0)
    heard = [signal.SIGTERM]
    with stops.listening(heard):
        assert stops.asked_by == signal.SIGTERM
        assert stops.request.reason == "SIGTERM"
        assert not stops.is_urgent
    still = StopSignals(SystemClock(), 5.0)
    with still.listening():
        assert not still.asked_by
