"""What a node takes for silence: no change, and never what another host's clock says."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from resilient.elastic.rendezvous.connect import SkewTolerantBackend

OTHER, OWN = _NodeDesc("other", 1, 1), _NodeDesc("own", 1, 2)
HOUR = timedelta(hours=1)


class Shared(RendezvousBackend):
    """A state that several nodes write."""

    def __init__(self) -> None:
        self.state = _RendezvousState()
        self.version = 0

    @property
    def name(self) -> str:
        return "shared"

    def get_state(self):
        return pickle.dumps(self.state), self.version

    def set_state(self, state, token=None):
        self.state = pickle.loads(state)  # noqa: S301 - its own
        self.version += 1
        return state, self.version, True


class Forward:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def shared():
    return Shared()


def node_at(shared, clock):
    settings = RendezvousSettings(
        "run", 1, 2, RendezvousTimeout(), timedelta(seconds=2), keep_alive_max_attempt=3
    )
    return _BackendRendezvousStateHolder(SkewTolerantBackend(shared, 30.0, clock), settings, 0)


@pytest.mark.parametrize("apart", [HOUR, -HOUR, timedelta()])
def test_a_node_lives_as_long_as_its_heartbeats_change(apart, shared):
    clock = Forward()
    node = node_at(shared, clock)
    for _ in range(5):
        shared.state.last_heartbeats[OTHER] = datetime.now(UTC) + apart
        node.sync()
        assert OTHER in node.state.last_heartbeats
        clock.seconds += 5.0
    clock.seconds += 1.5
    node.sync()
    assert OTHER not in node.state.last_heartbeats, "silent for more than six seconds"


def test_what_is_written_is_what_each_node_wrote(shared):
    clock = Forward()
    node = node_at(shared, clock)
    theirs, ours = datetime.now(UTC) - HOUR, datetime.now(UTC)
    shared.state.last_heartbeats[OTHER] = theirs
    shared.state.deadline = theirs
    node.sync()
    clock.seconds += 3.0
    node.sync()
    node.state.last_heartbeats[OWN] = ours
    node.mark_dirty()
    node.sync()
    assert shared.state.last_heartbeats == {OTHER: theirs, OWN: ours}
    assert shared.state.deadline == theirs


def test_a_last_call_lasts_as_long_on_every_host(shared):
    clock = Forward()
    node = node_at(shared, clock)
    shared.state.deadline = datetime.now(UTC) + HOUR
    node.sync()
    assert node.state.deadline - datetime.now(UTC) == pytest.approx(
        timedelta(seconds=30), abs=timedelta(seconds=2)
    )
    clock.seconds += 31.0
    node.sync()
    assert node.state.deadline < datetime.now(UTC)


def test_a_node_that_was_suspended_holds_its_own_absence_against_nobody(shared):
    clock = Forward()
    settings = RendezvousSettings(
        "run", 1, 2, RendezvousTimeout(), timedelta(seconds=2), keep_alive_max_attempt=3
    )
    backend = SkewTolerantBackend(shared, 30.0, clock, away_seconds=3.0)
    node = _BackendRendezvousStateHolder(backend, settings, 0)
    shared.state.last_heartbeats[OTHER] = datetime.now(UTC)
    node.sync()
    clock.seconds += 2.0
    node.sync()
    # All nodes stood still, and this one goes on first.
    clock.seconds += 600.0
    node.sync()
    assert OTHER in node.state.last_heartbeats
    clock.seconds += 2.0
    node.sync()
    assert OTHER in node.state.last_heartbeats
    clock.seconds += 2.5
    node.sync()
    assert OTHER not in node.state.last_heartbeats, "silent for more than six seconds"
