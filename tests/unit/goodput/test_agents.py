"""Which launchers of a run never said that they end."""

from __future__ import annotations

from resilient.goodput.event_log import Agent, agents
from tests.helpers.told import record


def test_launchers_come_in_order_with_what_they_said_at_their_end():
    told = [
        record(0, "AgentStarted", agent="a:1"),
        record(1, "AgentStarted", agent="b:1"),
        record(2, "MetricsLogged", rank=0),
        record(3, "RunEnded", agent="a:1", exit_code=75, reason="preempted"),
    ]
    began = told[0].at_ms
    assert agents(told) == [
        Agent("a", 1, began, 75, "preempted"),
        Agent("b", 1, began + 1000),
    ]


def test_a_number_that_is_used_again_is_another_launcher():
    told = [
        record(0, "AgentStarted", agent="a:1"),
        record(1, "RunAborted", agent="a:1", exit_code=1, reason="failed"),
        record(9, "AgentStarted", agent="a:1"),
    ]
    assert agents(told) == [Agent("a", 1, told[-1].at_ms)]


def test_what_names_no_launcher_is_passed_over():
    assert agents([record(0, "AgentStarted"), record(0, "AgentStarted", agent="nobody")]) == []
