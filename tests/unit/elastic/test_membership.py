"""A node notices that the world went on without it."""

import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, HashStore

from resilient.clock import SystemClock
from resilient.elastic.rendezvous.membership import (
    ExitBarrier,
    MembershipWatch,
    round_continued_without,
)
from resilient.elastic.rendezvous.roster import Roster, probe_hosts
from tests.helpers.clocks import OwnClock
from tests.helpers.rounds import Board, dies, join_all


@pytest.fixture
def handlers(monkeypatch):
    # As the agent's own are: torch else keeps the address of its store for all rounds.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    started = join_all(Board(), 2)
    yield started
    for one in started:
        one._stop_heartbeats()


def empties_the_round(handler):
    """Let a node take every silence for death, as after a long one, and write that down."""
    holder = handler._state_holder
    holder._settings = replace(holder._settings, keep_alive_interval=timedelta(0))
    for _ in ("find", "write"):
        holder.mark_dirty()
        handler.num_nodes_waiting()


def watch_of(handler, clock=None):
    roster = Roster(handler, handler._store, print)
    return MembershipWatch(handler, 1.0, clock or SystemClock(), roster)


def test_a_round_that_everybody_holds_is_no_change(handlers):
    for handler in handlers:
        watch = watch_of(handler)
        watch.look()
        assert not watch.is_changed


def test_a_node_that_waits_is_seen_at_once_by_whoever_asks_afresh(handlers):
    first, second = handlers
    second._state_holder._cache_duration = 60
    watch = watch_of(second)
    watch.look()
    first._state_holder.state.wait_list.add("a node that comes back")
    first._state_holder.mark_dirty()
    assert first.num_nodes_waiting() == 1
    watch.look()
    assert not watch.is_changed, "torch has not asked again"
    watch.look_uncached()
    assert watch.is_changed
    assert watch.is_joined


def test_a_node_that_waits_while_the_world_is_full_changes_nothing(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    first, second = join_all(Board(), 2, nodes_max=2)
    watch = watch_of(first)
    first._state_holder._cache_duration = 60
    # As torch leaves it there when more come than there is room for.
    first._state_holder.state.wait_list.add("one too many")
    watch.look()
    assert not watch.is_changed
    dies(first)
    watch.look()
    assert (watch.is_changed, watch.is_joined) == (True, True)
    for one in (first, second):
        one._stop_heartbeats()


def test_a_node_that_the_others_took_for_dead_joins_again(handlers):
    first, second = handlers
    empties_the_round(first)
    watch = watch_of(second)
    watch.look()
    assert second._state_holder.state.wait_list == set()
    assert watch.is_changed


def test_a_node_that_was_taken_for_dead_has_not_left_as_agreed(handlers):
    first, second = handlers
    watch = watch_of(first)
    first._state_holder._cache_duration = 60
    empties_the_round_of(first, second)
    watch.look()
    assert not watch.is_changed, "it may be on its way to meet the others again"
    watch.look_uncached()
    assert (watch.is_changed, watch.is_joined) == (True, False)


def test_a_node_that_said_goodbye_has_left_as_agreed(handlers):
    first, second = handlers
    Roster(second, second._store, print).publish_leave(second._get_world()[0])
    arrived(second)
    watch = watch_of(first)
    empties_the_round_of(first, second)
    watch.look_uncached()
    assert not watch.is_changed


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_node_that_meets_the_others_again_says_so_before_anybody_sees_it(is_joined, handlers):
    first, second = handlers
    watch, other = watch_of(first), watch_of(second)
    watch.look_uncached()
    assert not watch.is_changed
    other.is_joined = is_joined
    other.publish_regrouping()
    arrived(second)
    watch.look_uncached()
    assert (watch.is_changed, watch.is_joined) == (True, is_joined)


def empties_the_round_of(first, second):
    """Let one node take the other for dead, and write that down."""
    first.num_nodes_waiting()
    dies(first)
    first._state_holder.mark_dirty()
    first.num_nodes_waiting()
    assert second._this_node not in first._state_holder.state.participants


def test_a_rendezvous_that_was_closed_has_no_next_round(handlers):
    first, second = handlers
    empties_the_round(first)
    first.set_closed()
    second.num_nodes_waiting()
    assert not round_continued_without(second)


def test_a_node_that_is_silent_is_lost_after_a_while(handlers):
    first, _ = handlers
    roster = Roster(first, first._store, print)
    dies(first)
    assert roster.lost(10.0) == []
    assert roster.lost(13.0) == ["127.0.0.1"]
    assert roster.missing() == ["127.0.0.1"]


def test_nobody_is_missed_for_long_by_a_node_that_was_suspended(handlers):
    first, _ = handlers
    clock = OwnClock()
    watch = watch_of(first, clock)
    first._state_holder._cache_duration = 60
    first.num_nodes_waiting()
    dies(first)
    watch.look()
    clock.seconds += 600
    watch.look()
    assert watch.lost == []
    for _ in range(3):
        clock.seconds += 1
        watch.look()
    assert watch.lost == ["127.0.0.1"]


def test_a_rendezvous_is_lost_for_as_long_as_this_node_could_ask(handlers):
    first, _ = handlers
    clock = OwnClock()
    watch = watch_of(first, clock)
    first.num_nodes_waiting = unreachable
    watch.look()
    assert watch.lost_for_seconds() == 0
    clock.seconds += 1
    assert watch.lost_for_seconds() == 1
    clock.seconds += 600
    assert watch.lost_for_seconds() == 1
    clock.seconds += 1
    assert watch.lost_for_seconds() == 2


def arrived(handler):
    """Return when what a node wrote can be read: torch does not wait for that."""
    handler._store.check(["anything"])


def unreachable():
    raise DistNetworkError("the host of the store is gone")


def test_a_node_that_comes_back_to_wait_is_not_lost(handlers):
    first, second = handlers
    roster = Roster(first, first._store, print)
    dies(first)
    first._state_holder.state.wait_list.add(second._this_node)
    assert roster.lost(10.0) == roster.lost(20.0) == []


def test_a_node_that_left_as_agreed_is_not_lost(handlers):
    first, second = handlers
    Roster(second, second._store, print).publish_leave(second._get_world()[0])
    arrived(second)
    roster = Roster(first, first._store, print)
    dies(first)
    assert roster.lost(10.0) == roster.lost(20.0) == []
    assert roster.missing() == ["127.0.0.1"]


def test_whoever_refuses_a_connection_is_there():
    assert probe_hosts(["127.0.0.1"]) == (["127.0.0.1"], [])
    assert probe_hosts([]) == ([], [])


class Gone:
    def check(self, keys):
        raise DistNetworkError(f"{keys}: the host of the store is gone")


def test_a_node_that_still_runs_sees_that_another_is_done_and_nothing_in_a_lost_store():
    store, clock = HashStore(), SystemClock()
    mine, other = (ExitBarrier(store, node, 2, clock, 300.0) for node in (0, 1))
    assert not mine.is_begun()
    assert not other.is_passed()
    assert mine.is_begun()
    assert not ExitBarrier(store, 0, 1, clock, 300.0).is_begun()
    assert not ExitBarrier(Gone(), 0, 2, clock, 300.0).is_begun()


def test_who_is_done_is_counted_on_until_somebody_left_who_is_not():
    store, clock = HashStore(), SystemClock()
    mine, other = (ExitBarrier(store, node, 3, clock, 300.0) for node in (0, 1))
    assert not mine.can_pass([]), "nobody has heard of it"
    assert not mine.is_passed()
    assert mine.can_pass([])
    assert not mine.can_pass([1])
    other.is_passed()
    assert mine.can_pass([1])
    assert not mine.can_pass([1, 2])
    assert not ExitBarrier(Gone(), 0, 2, clock, 300.0).can_pass([])


def test_a_change_that_is_overlooked_is_found_again_while_it_lasts(handlers):
    watch = watch_of(handlers[0])
    handlers[0]._state_holder.state.wait_list.add("a late one")
    handlers[0]._state_holder._cache_duration = 60
    watch._interval_seconds = 0.01
    watch.start()
    until(lambda: watch.is_changed)
    time.sleep(0.1)
    watch.ignore_change()
    until(lambda: watch.is_changed)
    watch.stop()


def until(holds):
    end_seconds = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end_seconds
        time.sleep(0.01)


class Served:
    """A store that one process serves, as torch's rendezvous keeps it."""

    def __init__(self, host):
        self.host = host


def test_where_the_rendezvous_is_silent_its_server_is_gone_and_whoever_does_not_answer(
    handlers, monkeypatch
):
    first, second = handlers
    told = []
    second._store = Served("localhost")
    roster = Roster(second, second._store, told.append)
    roster.report_silent_nodes()
    roster.report_silent_nodes()
    assert [(one.agents, one.hosts, one.nodes_left) for one in told] == [(["127.0.0.1"], [], 1)]
    monkeypatch.setattr("resilient.elastic.rendezvous.roster._answers", lambda _: False)
    first._store = Served("10.1.2.3")
    Roster(first, first._store, told.append).report_silent_nodes()
    assert told[1:] == [], "this host may be cut off itself"
    first._store = Served("localhost")
    Roster(first, first._store, told.append).report_silent_nodes()
    assert (told[1].agents, told[1].hosts) == ([], ["127.0.0.1"])


@pytest.mark.parametrize("is_name", [True, False], ids=["name", "address"])
def test_a_resolver_that_does_not_answer_holds_nobody(handlers, monkeypatch, is_name):
    first, _ = handlers
    told, until_then = [], threading.Event()
    resolve = socket.getaddrinfo

    def held(host, *more, **options):
        if not is_name or host == "a-name":
            until_then.wait(60)
        return resolve(host, *more, **options)

    monkeypatch.setattr("resilient.elastic.rendezvous.roster._ASKED_SECONDS", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", held)
    first._store = Served("a-name" if is_name else "127.0.0.1")
    began_seconds = time.monotonic()
    Roster(first, first._store, told.append).report_silent_nodes()
    took_seconds = time.monotonic() - began_seconds
    until_then.set()
    assert took_seconds < 20
    # Of a name that leads nowhere it is not known whether it is a node's; an address says it.
    assert [one.hosts for one in told] == ([] if is_name else [["127.0.0.1"]])


def test_where_no_node_serves_the_rendezvous_none_is_accused(handlers):
    first, _ = handlers
    told = []
    first._store = Served("127.9.9.9")
    Roster(first, first._store, told.append).report_silent_nodes()
    assert told == []
