"""Hosts that compare whose rank hangs: resilient.elastic.rendezvous.remote_hangs."""

import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from torch.distributed import DistNetworkError, TCPStore

from resilient.distributed.heartbeat import Phase
from resilient.elastic.hang_detection import Hang, HostHangStatus, OverdueRank
from resilient.elastic.rendezvous.remote_hangs import PeerHangExchange
from resilient.events import Emitter
from tests.helpers.clocks import OwnClock

WAITING = HostHangStatus(0, 7, Phase.STEP, "S", 60.0, is_overdue=True)
STUCK = replace(WAITING, rank=1, phase=Phase.LOADING)
ANSWER_SECONDS, ACT_SECONDS = 3.0, 20.0


def hang_of(standing, edge=""):
    place = (standing.rank, standing.step, standing.phase, standing.state)
    return Hang((OverdueRank(*place, standing.waited_seconds, 10.0, edge),))


class Host:
    """One agent of some, with a clock that the test sets."""

    def __init__(self, store, node, nodes=2):
        self.clock, self.told = OwnClock(), []
        emit = Emitter(self.clock, (lambda _, event: self.told.append(event),))
        self.elsewhere = PeerHangExchange(store, node, nodes, "a life", self.clock, emit)

    def waits(self, standing):
        self.elsewhere.publish(standing)
        return self.elsewhere.has_culprit(hang_of(standing))

    def waits_after(self, seconds, standing):
        self.clock.seconds += seconds
        return self.waits(standing)

    def settles(self, standing, until):
        """Look as an agent does, without a moment passing for it, until it says so."""
        deadline = time.monotonic() + 20
        while not until():
            assert self.waits(standing)
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def hosts():
    """Start agents that share a store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stopped:

        def start(count, *silent):
            made = [Host(store, node, count) for node in range(count)]
            for node, one in enumerate(made):
                if node not in silent:
                    one.elsewhere.start()
                    stopped.callback(one.elsewhere.stop)
            return made

        yield start


def test_who_waits_for_another_host_says_so_and_leaves_it_to_that_one(hosts):
    mine, other = hosts(2)
    other.elsewhere.publish(STUCK)
    mine.settles(WAITING, lambda: mine.elsewhere.is_to_blame)
    (told,) = mine.told
    assert (told.rank, told.step, told.waiting) == (1, 7, 0)
    assert "waits for rank 1 of another host" in told.message()
    assert mine.waits_after(ANSWER_SECONDS - 1, WAITING)


def test_who_hangs_knows_as_soon_as_the_others_have_answered(hosts):
    mine, other = hosts(2)
    mine.elsewhere.publish(WAITING)
    deadline = time.monotonic() + 20
    while other.waits(STUCK):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not other.told
    assert not other.elsewhere.is_to_blame


@pytest.mark.slow
def test_one_that_is_behind_and_has_time_is_waited_for(hosts):
    mine, other = hosts(2)
    other.elsewhere.publish(replace(STUCK, is_overdue=False))
    mine.settles(WAITING, lambda: mine.elsewhere.is_to_blame)
    for _ in range(3):
        # Whoever waits looks often, and hears of it each time.
        time.sleep(1.2)
        assert mine.waits_after(ANSWER_SECONDS - 1, WAITING)
    assert len(mine.told) == 1


def test_silence_and_old_words_are_not_waited_for(hosts):
    mine, other = hosts(2, 1)
    mine._store = mine.elsewhere._store
    mine._store.set("resilient/standing/a life/1", STUCK.dump(5))
    assert mine.waits(WAITING)
    time.sleep(1.2)
    assert mine.waits_after(ANSWER_SECONDS - 1, WAITING)
    assert not mine.waits_after(1, WAITING)
    assert not other.told


def test_one_to_blame_whose_agent_does_nothing_is_not_waited_for_for_ever(hosts):
    mine, other = hosts(2)
    other.elsewhere.publish(STUCK)
    mine.settles(WAITING, lambda: mine.elsewhere.is_to_blame)
    other.elsewhere.stop()
    assert mine.waits_after(ACT_SECONDS - 1, WAITING)
    assert not mine.waits_after(1, WAITING)


def test_a_store_that_is_lost_is_not_waited_for():
    class Lost:
        def clone(self):
            raise DistNetworkError("the host of the store is gone")

    mine = Host(Lost(), 0)
    mine.elsewhere.start()
    assert mine.waits(WAITING)
    assert not mine.waits_after(ANSWER_SECONDS, WAITING)
    mine.elsewhere.stop()


@pytest.mark.parametrize("state", ["T", "D"])
def test_who_is_surely_stuck_waits_for_no_answer(hosts, state):
    mine, _ = hosts(2, 1)
    assert not mine.waits(replace(WAITING, state=state))


def test_nobody_else_and_what_is_outside_training_are_judged_at_once(hosts):
    (alone,) = hosts(1)
    assert not alone.waits(WAITING)
    mine, _ = hosts(2, 1)
    mine.elsewhere.publish(WAITING)
    assert not mine.elsewhere.has_culprit(hang_of(WAITING, "ending"))


def test_progress_ends_what_was_held_against_others(hosts):
    mine, other = hosts(2)
    other.elsewhere.publish(STUCK)
    mine.settles(WAITING, lambda: mine.elsewhere.is_to_blame)
    mine.elsewhere.publish(replace(WAITING, step=8, is_overdue=False))
    assert not mine.elsewhere.is_to_blame


def test_standings_of_many_hosts_are_one_question(hosts):
    """Each question is a way to the store and back; on a slow network they are what takes long."""
    mine, *others = hosts(5, 0)
    asked = []

    class Counted:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            asked.append(name)
            return getattr(self._store, name)

    for other in others:
        other.elsewhere.publish(WAITING)
    elsewhere, store = mine.elsewhere, Counted(mine.elsewhere._store)
    deadline = time.monotonic() + 20
    while len(elsewhere._peer_statuses) < len(others):
        elsewhere._read_peers(store)
        assert time.monotonic() < deadline
    asked.clear()
    elsewhere._read_peers(store)
    assert asked == ["multi_get"]
