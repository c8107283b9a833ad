"""The node that serves the rendezvous is lost while others meet there: they wait if told to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError

from resilient.elastic.rendezvous import connect
from resilient.elastic.rendezvous.connect import NO_RECONNECT, RendezvousReconnect


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=0.0, monotonic=lambda: made.now)
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    monkeypatch.setattr(connect, "time", made)
    return made


@pytest.fixture
def spec():
    return SimpleNamespace(rdzv_handler="first")


def joining(spec, *errors):
    """Return what meets once it has raised these, and the handlers that it met through."""
    left, seen = list(errors), []

    def join():
        seen.append(spec.rdzv_handler)
        if left:
            raise left.pop(0)

    return join, seen


def test_a_lost_place_is_looked_for_anew_each_time(clock, spec):
    join, seen = joining(spec, RendezvousConnectionError("lost"), RendezvousConnectionError("lost"))
    ways, told = iter(("second", "third")), []
    RendezvousReconnect(lambda: next(ways), 60).join_with_retries(spec, join, told.append)
    assert seen == ["first", "second", "third"]
    assert [one.message().startswith("the node that serves the rendezvous") for one in told] == [
        True
    ] * 2


def test_a_question_that_fails_after_joining_is_tried_at_the_same_place(clock, spec):
    # Torch takes a node that had joined out before it joins again, through the same handler.
    join, seen = joining(spec, dist.DistStoreError("no answer"))
    RendezvousReconnect(pytest.fail, 60).join_with_retries(spec, join, pytest.fail)
    assert seen == ["first", "first"]


@pytest.mark.parametrize("reconnect", [NO_RECONNECT, RendezvousReconnect(pytest.fail, 0)])
def test_without_a_wish_nobody_waits(clock, spec, reconnect):
    join, seen = joining(spec, RendezvousConnectionError("lost"))
    with pytest.raises(RendezvousConnectionError):
        reconnect.join_with_retries(spec, join, pytest.fail)
    assert (seen, reconnect.is_wanted) == (["first"], False)


def test_patience_ends(clock, spec):
    join, _ = joining(spec, *[RendezvousConnectionError("lost")] * 9)
    with pytest.raises(RendezvousConnectionError):
        RendezvousReconnect(lambda: "next", 5).join_with_retries(spec, join, lambda _: None)
    assert clock.now <= 5


def test_a_closed_rendezvous_is_over(clock, spec):
    join, seen = joining(spec, RendezvousClosedError())
    with pytest.raises(RendezvousClosedError):
        RendezvousReconnect(pytest.fail, 60).join_with_retries(spec, join, pytest.fail)
    assert seen == ["first"]
