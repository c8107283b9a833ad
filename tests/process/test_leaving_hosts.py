"""One of several agents is asked to leave: the others go on, or all end, as the request is meant.

One host plays all of them. Who comes first serves the rendezvous.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.agent_harness import wait_until
from tests.process.canonical_job import digest
from tests.process.host_jobs import SCRIPT, audited, calm_digest

STEPS = 24
# No save but the one that all agree on, so nothing else can have carried the work over.
JOB = {"max_steps": STEPS, "save_steps": 1000}
# A host that does not give its place back is waited for until it misses three of these.
SLOW_HEARTBEATS = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=20")

# As a trainer's ranks: all end with 75 once any was told; works until a file says that it is done.
RANK = """
def stop(number, frame):
    # A host that began alone is stopped when the other one joins, and nobody is to leave.
    if os.environ["WORLD_SIZE"] == "COUNT":
        open("../leaving", "w").close()
    sys.exit(75)

signal.signal(signal.SIGTERM, stop)
say("life", os.environ["WORLD_SIZE"])
size = int(os.environ["WORLD_SIZE"])
while not os.path.exists("../done"):
    if size == COUNT and os.path.exists("../leaving"):
        time.sleep(0.5)
        sys.exit(75)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The digest of the run when nothing happens to it."""
    return calm_digest(tmp_path_factory.mktemp("calm"), JOB)


@pytest.fixture
def hosts(node):
    """Start so many agents whose ranks only wait; return them once all ranks run."""

    def start(count, nnodes):
        script = RANK.replace("COUNT", str(count))
        options = ("--rdzv-conf", "last_call_timeout=3,keep_alive_interval=20", "--grace", "10")
        options = (*options, "--events", "events")
        agents = [node(script, nnodes, *options) for _ in range(count)]
        for one in agents:
            wait_until(lambda one=one: one.said("life")[-1:] == [str(count)], "all to meet", one)
        return agents

    return start


def told(agent, name):
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def said(agents):
    return "\n".join(one.err for one in agents)


def test_a_host_that_is_asked_to_leave_does_and_the_other_goes_on_from_that_step(
    node, tmp_path, calm
):
    run = tmp_path / "run"
    run.mkdir()
    script = (
        f"import runpy\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        f"sys.argv = ['job', 'rank', {str(run)!r}, '0.2', {json.dumps(JOB)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    options = (*SLOW_HEARTBEATS, "--events", "events")
    first, second = (node(script, "1:2", *options) for _ in range(2))
    beats = Path(run, "beats")
    joined = lambda: [one["world_size"] for one in told(first, "WorkerGroupStarted")][-1:] == [2]  # noqa: E731
    wait_until(joined, "both to meet", second)
    made = len(beats.read_text().split()) if beats.exists() else 0
    wait_until(lambda: beats.exists() and len(beats.read_text().split()) > made + 3, "steps", first)
    second.send(signal.SIGTERM)
    assert [second.end(), first.end()] == [75, 0], said([first, second])
    assert "127.0.0.1 leaves; 1 host continues (--nnodes 1:2)" in first.err
    assert [int(step) for step in beats.read_text().split()] == [*range(1, STEPS + 1)]
    assert audited(run)["ranks"][-2:] == [2, 1]
    assert digest(run) == calm
    leaves, _ = told(first, "RestartDecisionMade")[-2:]
    assert (leaves["ended"], leaves["action"], leaves["restarts_left"]) == (
        "preempted",
        "Restart",
        3,
    )
    assert not told(first, "NodesLost")
    assert told(first, "WorkerGroupStarted")[-1]["met_seconds"] < 20


def test_two_of_three_go_on_and_all_leave_once_those_are_asked_as_well(hosts):
    first, second, third = agents = hosts(3, "2:3")
    third.send(signal.SIGTERM)
    assert third.end() == 75, third.err
    for one in (first, second):
        wait_until(lambda one=one: one.said("life")[-1:] == ["2"], "the two to meet", one)
    second.send(signal.SIGTERM)
    first.send(signal.SIGTERM)
    assert [first.end(), second.end()] == [75, 75], said(agents)


def test_a_host_that_is_asked_while_it_waits_to_meet_again_leaves_too(hosts):
    first, second = agents = hosts(2, "1:2")
    second.send(signal.SIGTERM)
    wait_until(lambda: "host continues" in first.err, "it to go on", first)
    first.send(signal.SIGTERM)
    assert [first.end(), second.end()] == [75, 75], said(agents)
    assert first.said("life")[-1:] == ["2"], "its ranks did not start again"


@pytest.mark.parametrize(
    ("nnodes", "asked", "order"),
    [
        pytest.param("2:2", 1, signal.SIGTERM, id="a fixed number of hosts"),
        pytest.param("2:3", 1, signal.SIGTERM, id="too few would be left"),
        pytest.param("1:2", 0, signal.SIGTERM, id="the host of the rendezvous"),
        pytest.param("1:2", 1, signal.SIGINT, id="the whole run"),
    ],
)
def test_all_end_together_where_nobody_could_go_on_or_the_run_is_meant(hosts, nnodes, asked, order):
    agents = hosts(2, nnodes)
    agents[asked].send(order)
    assert [one.end() for one in agents] == [75, 75], said(agents)
    assert "continues" not in said(agents)


def test_all_end_together_where_ranks_leave_and_nobody_knows_who_was_asked(hosts, tmp_path):
    agents = hosts(2, "1:2")
    (tmp_path / "leaving").touch()
    assert [one.end() for one in agents] == [75, 75], said(agents)


@pytest.mark.parametrize("only_here", [False, True], ids=["the run", "this host"])
def test_the_run_is_stopped_from_one_host_or_that_host_alone(hosts, only_here, tmp_path):
    first, second = agents = hosts(2, "1:2")
    command = [sys.executable, "-m", "resilient_cli", "stop", str(second.folder), "--within", "0"]
    subprocess.run([*command, *(["--this-host"] if only_here else [])], check=True)
    assert second.end() == 75, said(agents)
    if only_here:
        wait_until(lambda: "host continues" in first.err, "it to go on", first)
        (tmp_path / "done").touch()
    assert first.end() == (0 if only_here else 75), said(agents)
    assert ("continues" in first.err) is only_here
