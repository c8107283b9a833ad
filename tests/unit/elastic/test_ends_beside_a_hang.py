"""A rank that ends while one of another host hangs, or has ended: because of that one, or not."""

import json
import signal
from types import SimpleNamespace

import pytest

from resilient.elastic.attempt_monitor import AttemptMonitor, MonitorContext
from resilient.elastic.options import Timeouts
from resilient.elastic.outcome import NO_EVIDENCE, Cause, Evidence, OutcomeKind
from resilient.elastic.workers.group import WorkerCommand, WorkerExit
from resilient.events import Emitter
from tests.helpers.clocks import OwnClock


class Asked:
    """A stop that is asked for once the life has ended."""

    def __init__(self, later):
        self._answers = [0]
        self._later = later

    @property
    def asked_by(self):
        return self._answers.pop() if self._answers else self._later


RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [::1]:2: Connection reset"


def outcome_of(status, tmp_path, evidence=NO_EVIDENCE, *, asked_by=0, **around):
    """Return how a life ends whose only rank here ended like that while another host is blamed."""
    clock = OwnClock()
    command = WorkerCommand(0, 0, ("python",), {}, tmp_path / "error.json")
    group = SimpleNamespace(
        exits=[WorkerExit(command, 1, status, clock.seconds, clock.seconds, is_killed=False)],
        wait=lambda _seconds: None,
        stop=lambda _seconds: None,
        is_running=False,
    )
    around = MonitorContext(
        stops=Asked(asked_by),
        members=None,
        barrier=None,
        health=SimpleNamespace(evidence=lambda: evidence, last_step=lambda: 5),
        peer_hangs=SimpleNamespace(is_to_blame=True),
        patience=Timeouts(),
        clock=clock,
        emit=Emitter(clock),
        tend=lambda: None,
        **around,
    )
    return AttemptMonitor(group, around).observe()


@pytest.mark.parametrize("status", [1, -signal.SIGABRT])
def test_who_waited_for_the_rank_that_hangs_is_not_to_blame(status, tmp_path):
    outcome = outcome_of(status, tmp_path)
    assert (outcome.cause, outcome.is_echo) == (Cause.PEER, True)


def test_a_rank_that_is_taken_meanwhile_was_taken(tmp_path):
    outcome = outcome_of(-signal.SIGKILL, tmp_path)
    assert outcome.is_killed_in_training
    assert not outcome.is_echo


def test_a_rank_that_is_killed_for_memory_meanwhile_was_that(tmp_path):
    outcome = outcome_of(-signal.SIGKILL, tmp_path, Evidence(oom_kills=1))
    assert (outcome.cause, outcome.is_echo) == (Cause.OOM_KILL, False)


@pytest.mark.parametrize(
    ("message", "nodes", "asked_by", "kind"),
    [
        (RESET, 2, 0, OutcomeKind.REGROUPED),
        (RESET, 1, 0, OutcomeKind.FAILED),
        (RESET, 2, signal.SIGTERM, OutcomeKind.FAILED),
        ("ValueError: boom", 2, 0, OutcomeKind.FAILED),
    ],
)
def test_who_only_lost_a_rank_of_another_host_has_not_failed(
    message, nodes, asked_by, kind, tmp_path
):
    said = {"message": {"message": message}, "monotonic_seconds": 0.0}
    (tmp_path / "error.json").write_text(json.dumps(said), encoding="utf-8")
    outcome = outcome_of(1, tmp_path, nodes=nodes, asked_by=asked_by)
    assert outcome.kind is kind
    assert outcome.is_peer_loss == (kind is OutcomeKind.REGROUPED)
