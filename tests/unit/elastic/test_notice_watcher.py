"""Who is told, how often, and what a source that fails or never answers costs."""

from __future__ import annotations

import threading
import time

import pytest

from resilient.clock import SystemClock
from resilient.elastic import events
from resilient.elastic.preemption.notice import Notice, SourceGarbled, SourceLost, unix_seconds
from resilient.elastic.preemption.watcher import Watcher
from resilient.events import Emitter

CLOCK = SystemClock()
WAIT_SECONDS = 10


class Script:
    """A source that says one thing after the other, and then the last one for ever."""

    every_seconds = 0.005

    def __init__(self, *said, name="script"):
        self.name = name
        self.said = list(said)
        self.looks = 0
        self.acknowledged = 0

    def look(self):
        self.looks += 1
        one = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(one, Exception):
            raise one
        return one

    def acknowledge(self):
        self.acknowledged += 1

    def close(self):
        pass


class Ear:
    def __init__(self):
        self.end_seconds = None
        self.requests = []
        self.told = threading.Event()

    def request_stop(self, request):
        self.requests.append(request)
        self.told.set()


class Watch:
    def __init__(self, *sources):
        self.ear = Ear()
        self.events = []
        emit = Emitter(CLOCK, (lambda _, event: self.events.append(event),))
        self.watcher = Watcher(sources, self.ear, CLOCK, emit, 25.0)
        self.watcher.start()

    def wait(self):
        assert self.ear.told.wait(WAIT_SECONDS), self.events
        self.end()
        return self.ear.requests

    def end(self):
        self.watcher.close()
        for thread in self.watcher._threads:
            thread.join(WAIT_SECONDS)

    def count(self, kind):
        return sum(isinstance(one, kind) for one in self.events)


def in_seconds(seconds, reason="cloud: gone"):
    return Notice(reason, unix_seconds(CLOCK) + seconds)


def wait_for(source, looks):
    until = time.monotonic() + WAIT_SECONDS
    while source.looks < looks:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_notice_becomes_one_request_with_its_deadline():
    watch = Watch(Script(None, None, in_seconds(30)))
    (request,) = watch.wait()
    assert request.reason == "cloud: gone"
    assert 26 < request.left_seconds(CLOCK.monotonic_seconds()) <= 28
    assert watch.count(events.NoticeReceived) == 1


def test_a_notice_that_is_there_at_the_start_is_reported_by_the_first_poll():
    class Slow(Script):
        def look(self):
            time.sleep(0.3)
            return super().look()

    watch = Watch(Script(None), Slow(in_seconds(30)))
    assert not watch.ear.requests
    watch.watcher.wait_first_polls(WAIT_SECONDS)
    assert len(watch.ear.requests) == 1
    watch.end()


def test_a_source_that_never_answers_delays_the_start_for_the_given_time_only():
    answer = threading.Event()

    class Silent(Script):
        def look(self):
            answer.wait()
            return super().look()

    watch = Watch(Silent(None))
    began_seconds = time.monotonic()
    watch.watcher.wait_first_polls(0.2)
    assert 0.2 <= time.monotonic() - began_seconds < WAIT_SECONDS
    answer.set()
    watch.end()


def test_a_notice_for_the_whole_run_is_a_request_for_it():
    (request,) = Watch(Script(Notice("slurm: end", is_for_all=True))).wait()
    assert request.is_for_all
    (request,) = Watch(Script(in_seconds(30))).wait()
    assert not request.is_for_all


def test_two_sources_that_say_the_same_are_one_request():
    watch = Watch(Script(in_seconds(30), name="a"), Script(in_seconds(20), name="b"))
    time.sleep(0.1)
    assert len(watch.wait()) == 1


def test_a_source_that_flaps_stops_the_run_once():
    watch = Watch(Script(in_seconds(30), None, in_seconds(30), None))
    time.sleep(0.1)
    assert len(watch.wait()) == 1


def test_an_early_notice_lets_training_go_on_and_says_when_the_host_goes():
    source = Script(in_seconds(3600))
    watch = Watch(source)
    wait_for(source, 5)
    watch.end()
    assert watch.ear.requests == []
    assert watch.ear.end_seconds - CLOCK.monotonic_seconds() == pytest.approx(
        3600, abs=WAIT_SECONDS
    )
    assert watch.count(events.NoticeReceived) == 1


def test_an_early_notice_that_is_withdrawn_is_told_and_can_come_again():
    far = in_seconds(3600)
    source = Script(far, None, far, None)
    watch = Watch(source)
    wait_for(source, 8)
    watch.end()
    assert watch.count(events.NoticeReceived) == 2
    assert watch.count(events.NoticeWithdrawn) == 2
    assert watch.ear.requests == []


def test_an_early_notice_is_acted_on_when_it_is_time():
    watch = Watch(Script(in_seconds(120.3)))
    (request,) = watch.wait()
    assert 110 < request.left_seconds(CLOCK.monotonic_seconds()) <= 118


def test_a_late_notice_is_acted_on_and_one_of_the_past_is_not():
    assert len(Watch(Script(in_seconds(-5))).wait()) == 1
    source = Script(in_seconds(-3600))
    watch = Watch(source)
    wait_for(source, 5)
    watch.end()
    assert watch.ear.requests == []
    assert watch.count(events.NoticeExpired) == 1


def test_advice_is_told_once_and_stops_nothing():
    source = Script(Notice("aws: rebalance recommended", None, is_advice=True))
    watch = Watch(source)
    wait_for(source, 5)
    watch.end()
    assert watch.count(events.PreemptionAdvised) == 1
    assert watch.ear.requests == []


def test_a_source_that_is_lost_is_told_once_asked_again_and_told_when_it_is_back():
    gone = SourceLost("no answer")
    source = Script(gone, None, None)
    watch = Watch(source)
    wait_for(source, 4)
    watch.end()
    assert watch.count(events.NoticeSourceLost) == 1
    assert watch.count(events.NoticeSourceFound) == 1


def test_a_source_that_stays_lost_is_asked_ever_more_rarely():
    source = Script(SourceLost("no answer"))
    watch = Watch(source)
    time.sleep(1.2)
    watch.end()
    assert source.looks <= 2
    assert watch.count(events.NoticeSourceLost) == 1


def test_nonsense_is_told_and_a_notice_after_it_is_heard():
    watch = Watch(Script(SourceGarbled("<html>"), SourceGarbled("<html>"), in_seconds(30)))
    assert len(watch.wait()) == 1
    assert watch.count(events.NoticeInvalid) == 1


def test_a_server_that_never_answers_holds_up_nothing():
    asleep = threading.Event()

    class Silent(Script):
        def look(self):
            asleep.wait(WAIT_SECONDS)

    watch = Watch(Silent(None), Script(in_seconds(30)))
    assert watch.ear.told.wait(WAIT_SECONDS)
    began = time.monotonic()
    watch.watcher.close()
    assert time.monotonic() - began < 0.5
    asleep.set()
    watch.end()


def test_nothing_is_delivered_after_the_end():
    go = threading.Event()

    class Slow(Script):
        def look(self):
            go.wait(WAIT_SECONDS)
            return in_seconds(30)

    watch = Watch(Slow(None))
    watch.watcher.close()
    go.set()
    watch.end()
    assert watch.ear.requests == []


def test_only_who_announced_the_end_hears_that_all_is_saved():
    cloud, other = Script(in_seconds(30), name="a"), Script(None, name="b")
    watch = Watch(cloud, other)
    watch.wait()
    watch.watcher.acknowledge()
    assert (cloud.acknowledged, other.acknowledged) == (1, 0)


def test_an_acknowledgement_that_fails_is_an_event():
    class Deaf(Script):
        def acknowledge(self):
            raise SourceLost("gone")

    watch = Watch(Deaf(in_seconds(30)))
    watch.wait()
    watch.watcher.acknowledge()
    assert watch.count(events.NoticeAckFailed) == 1
