"""A rank that ends while one of another host hangs: because of that one, or not."""

import signal
from types import SimpleNamespace

import pytest
from clocks import OwnClock

from resilient.agent.options import Patience
from resilient.agent.verdict.causes import NOTHING_SEEN, Cause, Evidence
from resilient.agent.watch import LifeWatch, Surroundings
from resilient.agent.workers.group import WorkerCommand, WorkerExit
from resilient.events import Emitter


def outcome_of(status, tmp_path, evidence=NOTHING_SEEN):
    """Return how a life ends whose only rank here ended like that while another host is blamed."""
    clock = OwnClock()
    command = WorkerCommand(0, 0, ("python",), {}, tmp_path / "error.json")
    group = SimpleNamespace(
        exits=[WorkerExit(command, 1, status, clock.seconds, clock.seconds, is_killed=False)],
        wait=lambda _seconds: None,
        stop=lambda _seconds: None,
    )
    around = Surroundings(
        stops=SimpleNamespace(asked_by=0),
        members=None,
        barrier=None,
        health=SimpleNamespace(evidence=lambda: evidence, last_step=lambda: 5),
        elsewhere=SimpleNamespace(is_to_blame=True),
        patience=Patience(),
        clock=clock,
        emit=Emitter(clock),
        tend=lambda: None,
    )
    return LifeWatch(group, around).observe()


@pytest.mark.parametrize("status", [1, -signal.SIGABRT])
def test_who_waited_for_the_rank_that_hangs_is_not_to_blame(status, tmp_path):
    outcome = outcome_of(status, tmp_path)
    assert (outcome.cause, outcome.is_echo) == (Cause.PEER, True)


def test_a_rank_that_is_taken_meanwhile_was_taken(tmp_path):
    outcome = outcome_of(-signal.SIGKILL, tmp_path)
    assert outcome.is_robbed
    assert not outcome.is_echo


def test_a_rank_that_is_killed_for_memory_meanwhile_was_that(tmp_path):
    outcome = outcome_of(-signal.SIGKILL, tmp_path, Evidence(oom_kills=1))
    assert (outcome.cause, outcome.is_echo) == (Cause.OOM_KILL, False)
