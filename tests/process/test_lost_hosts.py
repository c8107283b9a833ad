"""Hosts with their own addresses that are lost, each with an agent and a rank of one training.

Reduction is canonical, so how a run ends is the same to the bit whatever happened on the way.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from canonical_job import digest
from host_jobs import SCRIPT, audited

STEPS = 16
JOB = {"max_steps": STEPS}


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The digest of the run when nothing happens to it."""
    folder = tmp_path_factory.mktemp("calm")
    command = [sys.executable, str(SCRIPT), "sizes", str(folder), "1", json.dumps(JOB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["1"]


@pytest.fixture
def two(network, on_host, tmp_path):
    """Two hosts that train together."""
    hosts = network(2)
    first, second = (on_host(hosts, one, tmp_path, "1:2", **JOB) for one in (0, 1))
    second.wait_for_world(2)
    first.wait_for_steps(3)
    return hosts, first, second


def test_the_processes_of_a_host_are_killed_and_the_other_goes_on_alone(two, calm):
    hosts, first, _ = two
    hosts[1].kill()
    assert first.end() == 0, first.said
    answer = audited(first.run)
    assert answer["proven"]
    assert answer["place"]["step"] == STEPS
    assert answer["ranks"][-2:] == [2, 1]
    assert digest(first.run) == calm
