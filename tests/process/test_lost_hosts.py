"""Hosts with their own addresses that are lost, each with an agent and a rank of one training.

Reduction is canonical, so how a run ends is the same to the bit whatever happened on the way.
"""

from __future__ import annotations

import pytest

from tests.process.canonical_job import digest
from tests.process.host_jobs import audited, calm_digest

pytestmark = pytest.mark.long

STEPS = 24
JOB = {"max_steps": STEPS}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The digest of the run when nothing happens to it."""
    return calm_digest(tmp_path_factory.mktemp("calm"), JOB)


@pytest.fixture
def two(network, on_host, tmp_path, request):
    """Two hosts that train together."""
    hosts, more = network(2), {"pause": getattr(request, "param", 0.2), **JOB}
    first, second = (on_host(hosts, one, tmp_path, "1:2", "--grace", "5", **more) for one in (0, 1))
    second.wait_for_world(2)
    first.wait_for_steps(3)
    return hosts, first, second


def check_end(agent, calm, worlds):
    """Insist that nothing was lost or done twice, and on the bits of a calm run."""
    answer = audited(agent.run)
    assert answer["proven"]
    assert answer["place"]["step"] == STEPS
    assert answer["ranks"][-len(worlds) :] == worlds
    assert digest(agent.run) == calm


def lost(agent):
    return [(one["agents"], one["hosts"]) for one in agent.told("NodesLost")]


def test_the_processes_of_a_host_are_killed_and_the_other_goes_on_alone(two, calm):
    hosts, first, _ = two
    hosts[1].kill()
    assert first.end() == 0, first.said
    check_end(first, calm, [2, 1])
    assert lost(first)[-1] == ([hosts.address(1)], [])


# So slow that the one does not end alone before the other is back.
@pytest.mark.parametrize("two", [0.6], indirect=True)
def test_a_host_that_is_cut_off_leaves_and_comes_back(two, on_host, tmp_path, calm):
    hosts, first, second = two
    hosts.cut(1)
    first.wait_for_world(1)
    assert lost(first)[-1] == ([], [hosts.address(1)])
    assert second.end() == 69, second.said
    hosts.join(1)
    again = on_host(hosts, 1, tmp_path, "1:2", **JOB)
    assert [first.end(), again.end()] == [0, 0], first.said + again.said
    check_end(first, calm, [2, 1, 2])


def test_without_the_host_of_the_rendezvous_the_others_leave_and_the_run_can_go_on(
    two, on_host, tmp_path, calm
):
    hosts, first, second = two
    hosts[0].kill()
    assert second.end() == 69, second.said
    again = on_host(hosts, 0, tmp_path, "1:2", **JOB)
    assert again.end() == 0, again.said
    check_end(first, calm, [2, 1])
