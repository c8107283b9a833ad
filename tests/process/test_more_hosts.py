"""Three and four hosts: a slow link, a host that goes and comes back, a rank that hangs elsewhere.

Each has an agent and a rank of one training with canonical reduction, so how a run ends is the
same to the bit whatever happened on the way.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.process.canonical_job import digest
from tests.process.host_jobs import SCRIPT, audited, calm_digest

pytestmark = pytest.mark.long

STEPS = 16
JOB = {"max_steps": STEPS}
HANG_FLOOR_SECONDS = 3


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The digest of the run when nothing happens to it."""
    return calm_digest(tmp_path_factory.mktemp("calm"), JOB)


@pytest.fixture
def gang(network, on_host, tmp_path):
    """Start so many hosts that train together; return the network and their agents."""

    def start(count, nnodes, *options):
        hosts = network(count)
        agents = [
            on_host(hosts, one, tmp_path, nnodes, "--grace", "5", *options, **JOB)
            for one in range(count)
        ]
        agents[-1].wait_for_world(count)
        agents[0].wait_for_steps(3)
        return hosts, agents

    return start


def check_end(agent, calm, worlds):
    """Insist that nothing was lost or done twice, and on the bits of a calm run."""
    answer = audited(agent.run)
    assert answer["proven"]
    assert answer["place"]["step"] == STEPS
    assert answer["ranks"][-len(worlds) :] == worlds
    assert digest(agent.run) == calm


def seconds_of_steps(agent):
    began_seconds = time.monotonic()
    agent.wait_for_steps(3)
    return time.monotonic() - began_seconds


def ranks_on(host):
    """Return the ranks of a first life on a host; later ones are forks without a command line."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.processes()}
    name = SCRIPT.name.encode()
    return [pid for pid, line in lines.items() if name in line and b"resilient_cli" not in line]


def test_a_slow_link_costs_time_and_nothing_else(gang, calm):
    hosts, agents = gang(3, "1:3")
    before_seconds = seconds_of_steps(agents[0])
    hosts.slow(2, "6mbit")
    assert seconds_of_steps(agents[0]) > before_seconds
    assert [one.end() for one in agents] == [0, 0, 0], agents[0].said
    check_end(agents[0], calm, [3])
    assert not agents[0].told("NodesLost")


def test_one_host_of_four_goes_and_comes_back(gang, on_host, tmp_path, calm):
    hosts, agents = gang(4, "2:4")
    hosts[3].kill()
    agents[0].wait_for_world(3)
    again = on_host(hosts, 3, tmp_path, "2:4", **JOB)
    ends = [one.end() for one in (*agents[:3], again)]
    assert ends == [0] * 4, agents[0].said + again.said
    check_end(agents[0], calm, [4, 3, 4])


def test_a_rank_that_hangs_on_another_host_is_found_there_and_all_go_on(gang, calm):
    hosts, agents = gang(2, "2:2", "--hang-floor", str(HANG_FLOOR_SECONDS))
    stopped = ranks_on(hosts[1])
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert [one.end() for one in agents] == [0, 0], agents[0].said + agents[1].said
    hangs = agents[1].told("HangFound")
    assert [one["state"] for one in hangs] == ["stopped (SIGSTOP)"]
    assert "canonical_job.py" in hangs[0]["stacks"]["1"]["stacks"]
    # Its peer waits in a collective for as long, and is not what hangs.
    assert not agents[0].told("HangFound"), agents[0].said
    first, *_ = agents[0].told("RestartDecisionMade")
    # Its rank may die of the other's end before the other host is seen to come again.
    assert (first["ended"], first["cause"]) in (("regrouped", ""), ("failed", "peer"))
    # The sizes of worlds that trained, one after the other, and of both lives.
    check_end(agents[0], calm, [2])
    assert agents[0].worlds() == agents[1].worlds() == [2, 2]
