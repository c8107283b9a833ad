"""How several hosts end: nobody leaves who is needed, and nobody comes back who was counted on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, HashStore

from resilient.distributed.stop_request import StopRequest
from resilient.elastic.attempt_monitor import AttemptMonitor, MonitorContext
from resilient.elastic.options import Timeouts
from resilient.elastic.outcome import NO_EVIDENCE, OutcomeKind
from resilient.elastic.rendezvous.leave import leave_rendezvous
from resilient.elastic.rendezvous.membership import ExitBarrier
from resilient.elastic.rendezvous.roster import Roster
from resilient.elastic.restart_policy import Finish, GiveUp
from resilient.errors import Fenced, PeerFailed
from resilient.events import Emitter
from tests.helpers.clocks import OwnClock


class Members:
    """What is heard of the others: a change, and who has left the round."""

    lost, is_joined, lost_at_seconds = (), True, None

    def __init__(self, left=()):
        self.is_changed, self._left, self.overlooked = True, list(left), 0
        self.is_published = False

    def publish_regrouping(self):
        self.is_published = True

    def leave_or_stay(self, request):
        return 0 if request else 1

    def left(self):
        return self._left

    def ignore_change(self):
        self.overlooked += 1

    def lost_for_seconds(self):
        return 0.0


def watch_of(members, barrier, clock):
    """Return the watch over a host whose only worker has ended with 0."""
    around = MonitorContext(
        stops=SimpleNamespace(asked_by=0, request=None, is_urgent=False),
        members=members,
        barrier=barrier,
        health=SimpleNamespace(look=lambda *_: None, host_status=None),
        peer_hangs=SimpleNamespace(publish=lambda _: None),
        patience=Timeouts(),
        clock=clock,
        emit=Emitter(clock),
        tend=lambda: None,
    )
    group = SimpleNamespace(
        exits=[SimpleNamespace(status=0)],
        is_running=False,
        running_ranks=[],
        pids={},
        wait=clock.sleep,
        signal=lambda _: None,
    )
    return AttemptMonitor(group, around)


def barriers(nodes):
    store, clock = HashStore(), OwnClock()
    return [ExitBarrier(store, node, nodes, clock, 300.0) for node in range(nodes)], clock


def test_a_late_host_does_not_call_back_one_that_is_done():
    (mine, other), clock = barriers(2)
    members = Members()
    watch = watch_of(members, mine, clock)
    assert watch._look() is None
    assert members.overlooked == 1
    # This one is done and leaves: it closes the rendezvous behind it.
    assert other.is_passed()
    assert watch.observe().kind is OutcomeKind.SUCCEEDED


def test_who_is_done_meets_whoever_left_before_it_was():
    (mine, *_), clock = barriers(2)
    assert watch_of(Members(left=[1]), mine, clock).observe().kind is OutcomeKind.REGROUPED


@pytest.mark.parametrize("is_running", [True, False])
def test_a_late_host_is_let_in_while_ranks_run(is_running):
    (mine, _), clock = barriers(2)
    watch = watch_of(Members(), mine, clock)
    watch._group.is_running = is_running
    watch._stops.is_urgent = True  # its worker is not asked to end
    watch._group.kill, watch._group.wait_for_all = (lambda: None), (lambda _: True)
    outcome = watch._look()
    assert (outcome.kind if outcome else None) is (OutcomeKind.REGROUPED if is_running else None)
    assert watch._members.is_published is is_running


def stopped(watch, clock, within_seconds):
    """Have a host asked to stop whose worker has ended with 0; return how long it takes."""
    watch._stops.asked_by = 15
    watch._stops.request = StopRequest("SIGTERM", clock.seconds + within_seconds)
    watch._health.evidence = lambda: NO_EVIDENCE
    began_seconds = clock.seconds
    outcome = watch._look()
    assert (outcome.kind, outcome.status) == (OutcomeKind.STOPPED, 0)
    return clock.seconds - began_seconds


def test_a_host_that_is_asked_to_stop_when_it_is_done_says_so():
    (mine, other), clock = barriers(2)
    watch = watch_of(Members(), mine, clock)
    assert 8.0 <= stopped(watch, clock, 10) < 8.3
    assert other.is_passed(), "it would miss the first one, and find the rendezvous closed"


def test_such_a_host_waits_no_longer_than_for_the_others():
    (mine, other), clock = barriers(2)
    other.is_passed()
    assert stopped(watch_of(Members(), mine, clock), clock, 60) < 6
    hurried, clock = barriers(2)
    watch = watch_of(Members(), hurried[0], clock)
    watch._stops.is_urgent = True
    assert stopped(watch, clock, 60) == 0


class Handler:
    """The rendezvous of nodes that hold a round."""

    def __init__(self, *nodes):
        state = SimpleNamespace(
            participants={one: at for at, one in enumerate(nodes)},
            round=3,
            wait_list=set(),
            redundancy_list=set(),
        )
        self._state_holder = SimpleNamespace(state=state)
        self.is_shut = False

    def num_nodes_waiting(self):
        return 0

    def shutdown(self):
        self.is_shut = True
        return self.is_shut


class Goodbyes:
    """Two nodes' rosters over one store, and the first one leaving."""

    def __init__(self):
        self.store, self.clock = HashStore(), OwnClock()
        self.handler = Handler("first", "second")
        self.mine, self.other = (Roster(self.handler, self.store, print) for _ in range(2))
        self.stops = SimpleNamespace(asked_by=0, left_seconds=lambda: None)

    def leave(self, action):
        """Return how long it took."""
        began_seconds = self.clock.seconds
        group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=self.handler), group_rank=0)
        leave_rendezvous(group, self.mine, action, self.stops, self.clock, 25.0)
        return self.clock.seconds - began_seconds


PREEMPTED = Finish(75, "saved")


def test_a_host_that_has_saved_leaves_once_all_have():
    gone = Goodbyes()
    sleep = gone.clock.sleep

    def later(seconds):
        sleep(seconds)
        if gone.clock.seconds > 1003:
            gone.other.publish_leave(1)

    gone.clock.sleep = later
    assert 3.0 < gone.leave(PREEMPTED) < 3.3
    assert not gone.handler.is_shut
    assert not gone.other.waits_for_leaving_nodes(1)


def test_it_waits_for_others_no_longer_than_it_may():
    gone = Goodbyes()
    assert 25.0 <= gone.leave(PREEMPTED) < 25.2
    request = StopRequest("SIGTERM", gone.clock.seconds + 10)
    gone.stops.left_seconds = lambda: request.left_seconds(gone.clock.seconds)
    assert 8.0 <= gone.leave(PREEMPTED) < 8.2
    gone.stops.left_seconds = lambda: 0.0
    assert gone.leave(PREEMPTED) == 0


def test_nobody_waits_for_a_node_that_is_gone_or_without_a_store():
    gone = Goodbyes()
    del gone.handler._state_holder.state.participants["second"]
    assert gone.leave(PREEMPTED) == 0
    gone = Goodbyes()
    gone.mine._store = SimpleNamespace(set=unreachable, check=unreachable)
    assert gone.leave(PREEMPTED) == 0


def test_who_has_left_the_round_itself_waits_for_nobody():
    gone = Goodbyes()
    del gone.handler._state_holder.state.participants["first"]
    assert gone.leave(PREEMPTED) == 0
    gone = Goodbyes()
    gone.handler._state_holder.state.round = 4
    assert gone.leave(PREEMPTED) == 0


@pytest.mark.parametrize("spares", ["wait_list", "redundancy_list"])
def test_hosts_that_wait_for_room_hear_that_the_run_is_over(spares):
    gone = Goodbyes()
    setattr(gone.handler._state_holder.state, spares, {"third"})
    assert gone.leave(Finish(0, "done")) == 2.5
    gone.handler.shutdown = lambda: False
    assert gone.leave(Finish(0, "done")) == 0, "nobody hears it"


def unreachable(*_):
    raise DistNetworkError("the host of the store is gone")


def test_a_run_that_is_over_closes_the_rendezvous_and_one_that_cannot_be_reached_does_not():
    for action, is_shut in (
        (Finish(0, "done"), True),
        (GiveUp(70, "crash loop"), True),
        (GiveUp(PeerFailed.exit_code, "gone"), False),
        (GiveUp(Fenced.exit_code, "a newer life exists"), False),
    ):
        gone = Goodbyes()
        assert gone.leave(action) == 0
        assert gone.handler.is_shut is is_shut
    gone = Goodbyes()
    del gone.handler._state_holder.state.participants["first"]
    gone.leave(GiveUp(70, "crash loop"))
    assert not gone.handler.is_shut, "the others have gone on without it"
    gone = Goodbyes()
    gone.stops.asked_by = 15
    gone.leave(GiveUp(143, "left at once"))
    assert not gone.handler.is_shut
