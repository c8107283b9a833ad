"""Some hosts are asked to leave: who says so, who goes on, and how their places come free."""

from __future__ import annotations

import signal
import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, HashStore

from resilient.distributed.stop_request import StopRequest
from resilient.elastic.attempt_monitor import AttemptMonitor, MonitorContext
from resilient.elastic.options import Timeouts
from resilient.elastic.outcome import Outcome, OutcomeKind
from resilient.elastic.rendezvous.leave import leave_rendezvous, leave_round
from resilient.elastic.rendezvous.membership import MembershipWatch
from resilient.elastic.rendezvous.roster import (
    HostsReleased,
    LeaveScope,
    Roster,
    hosts_that_stay,
    is_served_here,
)
from resilient.elastic.restart_policy import Finish, GiveUp, Restart, RestartBudget, decide
from resilient.elastic.signals import StopSignals
from resilient.events import Emitter
from tests.helpers.clocks import OwnClock
from tests.helpers.rounds import Board, join_all, meet

ALONE, ALL, SERVES = (
    one.value for one in (LeaveScope.ALONE, LeaveScope.WITH_ALL, LeaveScope.WITH_RENDEZVOUS)
)
SAVED = Outcome(OutcomeKind.PREEMPTED, 75, hosts_left=2)


@pytest.mark.parametrize(
    ("asked", "nodes", "least", "left"),
    [
        ([ALONE], 2, 1, 1),
        ([ALONE, ALONE], 4, 2, 2),
        ([ALONE, ALONE], 3, 2, 0),  # fewer than MIN would be left
        ([ALONE], 2, 2, 0),  # a fixed number of hosts
        ([], 2, 1, 0),  # nobody knows who was asked
        ([ALL], 2, 1, 0),
        ([ALONE, ALL], 4, 1, 0),
        ([SERVES], 3, 1, 0),
    ],
)
def test_who_was_not_asked_goes_on_if_the_request_was_for_some(asked, nodes, least, left):
    assert hosts_that_stay(asked, nodes, least) == left


def test_hosts_that_go_on_meet_again_for_free():
    spent = RestartBudget(restarts_left=0, no_progress_lives=3)
    assert decide(SAVED, spent) == Restart("membership", is_paid=False)
    assert decide(Outcome(OutcomeKind.PREEMPTED, 75), spent).code == 75
    assert SAVED.is_interruption
    assert isinstance(decide(SAVED, RestartBudget(preemptions_left=-1)), GiveUp)


def test_it_is_told_who_leaves_and_how_many_go_on():
    assert HostsReleased(["h2"], 1, 1, 2).message() == "h2 leaves; 1 host continues (--nnodes 1:2)"
    assert HostsReleased(["h2", "h3"], 2, 1, 4).message() == (
        "h2, h3 leave; 2 hosts continue (--nnodes 1:4)"
    )


class Node(SimpleNamespace):
    """Told from others by who it is."""

    __hash__ = object.__hash__


NODES = {name: Node(addr=name) for name in ("a", "b", "c")}


class Host:
    """One node of a round, and what it told."""

    def __init__(self, name, names, store, sizes=(1, 3)):
        self.told = []
        state = SimpleNamespace(
            participants={NODES[one]: at for at, one in enumerate(names)},
            round=0,
            wait_list=set(),
            redundancy_list=set(),
        )
        handler = SimpleNamespace(
            _state_holder=SimpleNamespace(state=state),
            _this_node=NODES[name],
            settings=SimpleNamespace(min_nodes=sizes[0], max_nodes=sizes[1]),
        )
        self.roster = Roster(handler, store, self.told.append)


def hosts(*names, store=None, sizes=(1, 3)):
    store = store or HashStore()
    return [Host(name, names, store, sizes) for name in names]


def test_the_others_go_on_and_the_one_that_leaves_hears_that():
    first, second, third = hosts("a", "b", "c")
    third.roster.publish_stop_request(is_for_all=False)
    assert not third.roster.is_continued_without()
    assert [one.roster.stay() for one in (first, second)] == [2, 2]
    assert first.told == [HostsReleased(["c"], 2, 1, 3)]
    assert third.roster.is_continued_without()
    assert not third.roster.waits_for_leaving_nodes(2)


def test_a_host_that_left_as_asked_is_not_missed_although_the_store_of_the_round_is_gone():
    first, _, third = hosts("a", "b", "c")
    third.roster.publish_stop_request(is_for_all=False)
    first.roster.stay()
    there = first.roster._handler._state_holder.state.participants
    first.roster._store = SimpleNamespace(check=unreachable, set=unreachable)
    del there[NODES["c"]]
    assert first.roster.missing() == []
    del there[NODES["b"]]
    assert first.roster.missing() == ["b"]


@pytest.mark.parametrize(("names", "sizes"), [("abc", (3, 3)), ("abc", (3, 4)), ("a", (1, 2))])
def test_nobody_goes_on_where_hosts_would_be_too_few_or_nobody_was_asked(names, sizes):
    first, *others = hosts(*names, sizes=sizes)
    for one in others[-1:]:
        one.roster.publish_stop_request(is_for_all=False)
    assert first.roster.stay() == 0
    assert not first.told
    assert not any(one.roster.is_continued_without() for one in others)


def test_a_request_for_all_and_a_store_that_is_gone_leave_nobody():
    first, second = hosts("a", "b")
    second.roster.publish_stop_request(is_for_all=True)
    assert first.roster.stay() == 0
    (alone, _) = hosts("a", "b", store=SimpleNamespace(check=unreachable, set=unreachable))
    alone.roster.publish_stop_request(is_for_all=False)
    assert alone.roster.stay() == 0
    assert not alone.roster.is_continued_without()


def unreachable(*_):
    raise DistNetworkError("the host of the store is gone")


def test_a_store_that_hangs_does_not_keep_the_order_from_the_ranks():
    held = threading.Event()
    (asked, _) = hosts("a", "b", store=SimpleNamespace(set=lambda *_: held.wait(60)))
    began_seconds = time.monotonic()
    asked.roster.publish_stop_request(is_for_all=False)
    assert time.monotonic() - began_seconds < 10
    held.set()


def test_whoever_listens_at_the_port_of_the_store_serves_it():
    with socket.create_server(("127.0.0.1", 0)) as served:
        port = served.getsockname()[1]
        handler = SimpleNamespace(_store=SimpleNamespace(port=port))
        assert is_served_here(handler)
        first, second = hosts("a", "b")
        second.roster._handler._store = handler._store
        second.roster.publish_stop_request(is_for_all=False)
        assert first.roster.stay() == 0, "without it nobody meets again"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            handler._store.port = connection.getsockname()[1]
            assert not is_served_here(handler), "it is connected there and does not listen"
    assert not is_served_here(SimpleNamespace())


def watch_of(members, request=None, statuses=(75,)):
    """Return the watch over a host whose workers have ended, with 75 if nothing else is said."""
    clock = OwnClock()
    around = MonitorContext(
        stops=SimpleNamespace(asked_by=0, request=request, is_urgent=False),
        members=members,
        barrier=SimpleNamespace(),
        health=SimpleNamespace(),
        peer_hangs=SimpleNamespace(),
        patience=Timeouts(),
        clock=clock,
        emit=Emitter(clock),
        tend=lambda: None,
    )
    group = SimpleNamespace(
        exits=[SimpleNamespace(status=one, is_killed=False) for one in statuses],
        is_running=False,
        running_ranks=[],
        wait=clock.sleep,
        signal=lambda _: None,
    )
    return AttemptMonitor(group, around)


class Members:
    """What is known of the others: nobody has gone."""

    is_changed = False

    def look_uncached(self):
        """Nothing is new."""

    def leave_or_stay(self, request):
        return 0 if request else 2


def test_a_host_that_was_not_asked_looks_who_was_when_its_ranks_have_left():
    assert watch_of(Members()).observe() == Outcome(OutcomeKind.PREEMPTED, hosts_left=2)
    asked = StopRequest("SIGTERM", 9.0)
    assert watch_of(Members(), asked)._look() == Outcome(OutcomeKind.PREEMPTED), "asked meanwhile"


def test_a_host_says_that_it_stays_although_others_wait_for_it_already():
    members = Members()
    members.is_changed, members.is_joined = True, True
    assert watch_of(members).observe() == Outcome(OutcomeKind.PREEMPTED, hosts_left=2)
    members.leave_or_stay = lambda _: 0
    assert watch_of(members).observe() == Outcome(OutcomeKind.REGROUPED, is_joined=True)


def test_a_host_whose_ranks_have_not_all_saved_does_not_say_that_it_goes_on():
    said = []
    members = SimpleNamespace(
        leave_or_stay=said.append, look_uncached=lambda: None, is_changed=False
    )
    watch = watch_of(members, statuses=(75, 143))
    assert watch.observe().kind is OutcomeKind.STOPPED
    watch._end = lambda *, sends_request: False
    assert watch.observe().kind is OutcomeKind.KILLED
    assert said == []


def test_a_host_that_was_asked_says_so_and_leaves_and_the_others_look():
    first, second = (
        MembershipWatch(one.roster._handler, 1.0, OwnClock(), one.roster) for one in hosts("a", "b")
    )
    assert second.leave_or_stay(StopRequest("SIGTERM", 9.0)) == 0
    assert first.leave_or_stay(None) == 1
    assert second.leave_or_stay(StopRequest("SIGINT", 9.0, is_for_all=True)) == 0
    assert first.leave_or_stay(None) == 0


def test_a_host_that_is_asked_says_so_before_its_ranks_hear_of_it():
    said = []
    request = StopRequest("SIGTERM", 2000.0)
    watch = watch_of(SimpleNamespace(leave_or_stay=said.append), request)
    watch._stops.asked_by = signal.SIGTERM
    watch._group.signal = lambda _: said.append("ranks")
    watch._failures_of_stop = list
    assert watch._look().status == 75
    assert said == [request, "ranks"]


def test_a_host_that_hears_while_its_ranks_end_that_all_are_meant_says_so():
    said = []
    here, run = StopRequest("SIGTERM", 2000.0), StopRequest("SIGINT", 2000.0, is_for_all=True)
    watch = watch_of(SimpleNamespace(leave_or_stay=said.append), here)
    watch._stops.asked_by = signal.SIGTERM
    watch._failures_of_stop = list
    group, waits = watch._group, iter([run, None])
    group.is_running = True

    def wait(_):
        watch._stops.request = next(waits) or run
        group.is_running = len(said) == 1

    group.wait = wait
    assert watch._look().status == 75
    assert said == [here, run]


def test_a_request_for_all_stays_one_whatever_else_comes():
    here, run = StopRequest("SIGTERM", 9.0), StopRequest("SIGINT", 5.0, is_for_all=True)
    assert here.within(run).is_for_all
    assert run.within(here) is run
    assert StopRequest("", 1.0).within(run) == StopRequest("", 1.0, is_for_all=True)


@pytest.mark.parametrize(("number", "is_for_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_who_sits_at_a_terminal_means_the_whole_run(number, is_for_all):
    stops = StopSignals(OwnClock())
    stops._handle_signal(number, None)
    assert stops.request.is_for_all is is_for_all


def test_the_place_of_a_host_that_leaves_is_free_at_once(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # Both are played by the process that serves the store.
    monkeypatch.setattr("resilient.elastic.rendezvous.roster.is_served_here", lambda _: False)
    first, second = join_all(Board(), 2)
    for one in (first, second):
        for part in (one, one._op_executor, one._state_holder):
            part._settings = replace(part._settings, min_nodes=1)
    rosters = [Roster(one, first._store, print) for one in (first, second)]
    rosters[1].publish_stop_request(is_for_all=False)
    assert rosters[0].stay() == 1
    group = SimpleNamespace(
        spec=SimpleNamespace(rdzv_handler=second), group_rank=second._get_world()[0]
    )
    stops = SimpleNamespace(asked_by=15, left_seconds=lambda: 20.0)
    saved = Finish(75, "saved")
    assert leave_rendezvous(group, rosters[1], saved, stops, OwnClock(), 25.0)
    leave_round(second)
    first.num_nodes_waiting()
    assert second._this_node not in first._state_holder.state.participants
    (told,) = meet([first])
    assert told.world_size == 1
    first._stop_heartbeats()
