"""Nodes that have met wait for each other's word, and for nobody who has gone meanwhile."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from resilient.elastic.rendezvous import connect
from resilient.elastic.rendezvous.attempt import AttemptRegistry
from resilient.elastic.rendezvous.connect import (
    NO_RECONNECT,
    MemberSilent,
    RendezvousAborted,
    RoundStore,
    end_waits_with_members,
)
from resilient.elastic.rendezvous.roster import Roster
from tests.helpers.clocks import OwnClock
from tests.helpers.rounds import Board, connect_all, dies, join_all


@pytest.fixture
def pair(monkeypatch):
    """Two nodes that have met, as the first one sees them."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    first, second = join_all(Board(), 2, nodes_max=2)
    for one in (first, second):
        one._state_holder._cache_duration = 60  # what is done to its state stays
        one._state_holder._last_sync_time = time.monotonic()
    yield first, second
    for one in (first, second):
        one._stop_heartbeats()


def store_of(handler):
    return RoundStore(handler._get_store(), handler)


def group_of(handler, store, place=1):
    spec = SimpleNamespace(rdzv_handler=handler)
    return SimpleNamespace(
        spec=spec, store=store, group_rank=place, group_world_size=2, master_addr=""
    )


def test_what_others_have_said_is_read_at_once(pair):
    store = store_of(pair[0])
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.multi_get(["a"]) == [b"1"]
    assert sorted(store.members.values()) == [0, 1]


@pytest.mark.parametrize("read", ["get", "multi_get"])
def test_nobody_waits_for_the_word_of_a_node_that_is_gone(read, pair):
    store = store_of(pair[0])
    dies(pair[0])
    with pytest.raises(MemberSilent, match=r"127\.0\.0\.1"):
        getattr(store, read)("word" if read == "get" else ["word"])


def test_a_round_that_is_over_keeps_nobody_waiting(pair):
    store = store_of(pair[0])
    pair[0]._state_holder.state.round += 1
    with pytest.raises(MemberSilent):
        store.get("word")


def test_a_member_that_lives_and_says_nothing_is_waited_for_a_minute(pair, monkeypatch):
    clock = OwnClock()
    slow = SimpleNamespace(monotonic=clock.monotonic_seconds, sleep=clock.sleep)
    store = store_of(pair[0])
    monkeypatch.setattr(connect, "time", slow)
    with pytest.raises(MemberSilent, match="60 s"):
        store.get("word")
    assert 1060 < clock.seconds < 1062


def test_fewer_than_are_needed_do_not_start(pair):
    dies(pair[0])
    with pytest.raises(MemberSilent, match="2 are needed"):
        store_of(pair[0])


def test_a_world_with_a_hole_does_not_start(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    handlers = join_all(Board(), 3)
    third = next(one for one in handlers if one._get_world()[0] == 2)
    state = third._state_holder.state
    gone = next(node for node, place in state.participants.items() if place == 0)
    object.__setattr__(third._settings, "min_nodes", 1)
    del state.participants[gone]
    with pytest.raises(MemberSilent, match=r"\[1, 2\]"):
        store_of(third)
    for one in handlers:
        one._stop_heartbeats()


def test_a_meeting_goes_through_such_a_store_and_a_static_one_does_not(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    (handler,) = connect_all(Board(), 1, 1)
    met = end_waits_with_members(handler).next_rendezvous()
    assert isinstance(met.store, RoundStore)
    handler._stop_heartbeats()
    static = object()
    assert end_waits_with_members(static) is static


def test_who_leads_here_lets_waits_end(monkeypatch, pair):
    monkeypatch.setattr(
        "torch.distributed.elastic.rendezvous.registry.get_rendezvous_handler", lambda _: pair[0]
    )
    told = SimpleNamespace(get_as_int=lambda *_: 0, backend="none")
    assert isinstance(connect.connect(told)._get_store(), RoundStore)


def test_the_life_of_another_world_is_nobodys_here(pair):
    store, clock = store_of(pair[1]), OwnClock()
    registry = AttemptRegistry("run", clock)
    life = {"number": 1, "attempt": "a", "cause": "start", "resume": "auto", "host": "h", "port": 1}
    store.set("resilient/life/0", json.dumps({**life, "nodes": 2}))
    assert registry.agree(group_of(pair[1], store), 1, "start", "auto").attempt == "a"
    store.set("resilient/life/0", json.dumps({**life, "nodes": 3}))
    with pytest.raises(MemberSilent, match="has joined 3 nodes, and this one 2"):
        registry.agree(group_of(pair[1], store), 1, "start", "auto")


def test_a_first_node_that_is_gone_is_not_waited_for(pair):
    store = store_of(pair[1])
    dies(pair[1])
    with pytest.raises(MemberSilent):
        AttemptRegistry("run", OwnClock()).agree(group_of(pair[1], store), 1, "start", "auto")


def test_who_met_is_known_however_late_the_roster_is_made(pair):
    store = store_of(pair[0])
    dies(pair[0])
    roster = Roster(pair[0], store, print)
    assert roster.nodes == 2
    assert roster.lost(10.0) == []
    assert roster.lost(13.0) == ["127.0.0.1"]


@pytest.fixture
def clock(monkeypatch):
    made = OwnClock()
    moved = SimpleNamespace(monotonic=made.monotonic_seconds, sleep=made.sleep)
    monkeypatch.setattr(connect, "time", moved)
    return made


def test_the_rest_meet_again_through_the_same_handler(clock, pair):
    left, told = [MemberSilent("gone"), MemberSilent("gone")], []

    def join():
        clock.seconds += 20
        if left:
            raise left.pop()
        return "met"

    spec = SimpleNamespace(rdzv_handler=pair[0])
    NO_RECONNECT.join_with_retries(spec, join, told.append)
    assert [type(one) for one in told] == [RendezvousAborted] * 2
    assert told[0].message() == "joining the rendezvous again: gone"
    assert spec.rdzv_handler is pair[0]


def test_they_do_so_as_long_as_nodes_wait_for_others(clock, pair):
    def join():
        clock.seconds += 100
        raise MemberSilent("gone")

    with pytest.raises(MemberSilent):
        NO_RECONNECT.join_with_retries(SimpleNamespace(rdzv_handler=pair[0]), join, lambda _: None)
    assert clock.seconds == 1000 + 700


def test_a_meeting_that_is_over_for_good_is_not_tried_again(clock, pair):
    def join():
        raise RendezvousClosedError

    with pytest.raises(RendezvousClosedError):
        NO_RECONNECT.join_with_retries(SimpleNamespace(rdzv_handler=pair[0]), join, pytest.fail)
