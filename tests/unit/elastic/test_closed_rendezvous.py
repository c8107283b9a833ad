"""A host that waits for room when the run ends learns how it ended."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, HashStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
)

from resilient.elastic.outcome import OutcomeKind
from resilient.elastic.rendezvous.leave import leave_rendezvous, outcome_of_closed
from resilient.elastic.rendezvous.roster import Roster
from resilient.elastic.restart_policy import Finish, GiveUp, RestartBudget, decide
from tests.helpers.clocks import OwnClock


class Handler:
    """A rendezvous whose state says who waits."""

    def __init__(self, store, node="mine", **lists):
        state = {"participants": {}, "wait_list": set(), "redundancy_list": set(), "round": 0}
        self._state_holder = SimpleNamespace(state=SimpleNamespace(**{**state, **lists}))
        self._store, self._this_node = store, node

    def get_run_id(self):
        return "run"

    def num_nodes_waiting(self):
        return 0

    def shutdown(self):
        return True


def leave(store, action):
    """Let another host end the run."""
    handler = Handler(store)
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler), group_rank=0)
    stops = SimpleNamespace(asked_by=0)
    leave_rendezvous(group, Roster(handler, store, print), action, stops, OwnClock(), 25.0)


@pytest.mark.parametrize(
    ("lists", "error"),
    [
        ({"wait_list": {"mine"}}, RendezvousClosedError),
        ({"redundancy_list": {"mine"}}, RendezvousGracefulExitError),
    ],
)
def test_who_waited_for_room_ends_as_the_others_did(lists, error):
    done, given_up = HashStore(), HashStore()
    leave(done, Finish(0, "all workers are done"))
    leave(given_up, GiveUp(70, "crash loop"))
    assert outcome_of_closed(Handler(done, **lists), error()).kind is OutcomeKind.SUCCEEDED
    outcome = outcome_of_closed(Handler(given_up, **lists), error())
    assert outcome.kind is OutcomeKind.UNREACHABLE
    assert "the rendezvous is closed" in outcome.reason


def test_who_comes_to_a_closed_rendezvous_knows_nothing_of_a_run():
    done = HashStore()
    leave(done, Finish(0, "all workers are done"))
    assert outcome_of_closed(Handler(done), RendezvousClosedError()).kind is OutcomeKind.UNREACHABLE
    assert outcome_of_closed(object(), RendezvousClosedError()).kind is OutcomeKind.UNREACHABLE


def test_a_store_that_is_gone_says_nothing():
    def unreachable(*_):
        raise DistNetworkError("gone")

    gone = SimpleNamespace(check=unreachable, set=unreachable)
    leave(gone, Finish(0, "all workers are done"))
    waiting = Handler(gone, wait_list={"mine"})
    assert outcome_of_closed(waiting, RendezvousClosedError()).kind is OutcomeKind.UNREACHABLE


def test_who_was_part_of_a_run_ends_with_the_code_and_the_reason_of_who_gave_it_up_first():
    store = HashStore()
    leave(store, GiveUp(78, "no way"))
    leave(store, GiveUp(70, "crash loop"))
    outcome = outcome_of_closed(Handler(store), RendezvousClosedError(), has_run_before=True)
    assert outcome.reason.endswith(f"the run ended on {socket.gethostname()}: no way")
    assert decide(outcome, RestartBudget()) == GiveUp(78, outcome.reason)
    newcomer = outcome_of_closed(Handler(store), RendezvousClosedError())
    assert decide(newcomer, RestartBudget()).code == 69


@pytest.mark.parametrize("said", ["", "{}", "[]", "3", '{"code": "x"}'])
def test_what_nobody_can_read_is_69_with_a_reason(said):
    store = HashStore()
    store.set("resilient/why/run", said)
    outcome = outcome_of_closed(Handler(store), RendezvousClosedError(), has_run_before=True)
    told = GiveUp(69, "the rendezvous is closed: RendezvousClosedError")
    assert decide(outcome, RestartBudget()) == told


def test_who_gives_up_stays_until_the_others_may_have_heard_why():
    clock, store = OwnClock(), HashStore()
    handler = Handler(store, participants={"mine": 0, "other": 1})
    group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler), group_rank=0)
    roster, stops = Roster(handler, store, print), SimpleNamespace(asked_by=0)
    began_seconds = clock.monotonic_seconds()
    leave_rendezvous(group, roster, GiveUp(70, "crash loop"), stops, clock, 25.0)
    assert clock.monotonic_seconds() > began_seconds + 1
