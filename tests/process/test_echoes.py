"""Ranks that lose the connection to another one in a collective: the other is to blame."""

from __future__ import annotations

import json
import socket

import pytest

TRAINS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")

def train(steps):
    for _ in range(steps):
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.005)
"""


def told(agent, name):
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("end", "code", "cause"),
    [
        ("os._exit(78)", 78, "exit"),
        ("__import__('ctypes').CDLL(None).exit(78)", 78, "exit"),
        ("os.abort()", 134, "signal"),
    ],
    ids=["exit", "exit of C", "abort"],
)
def test_a_rank_that_ends_without_a_word_is_to_blame_and_not_its_peer(train, end, code, cause):
    # The peer has reported the loss, and may have ended, before the end of the other is seen.
    agent = train(
        f"{TRAINS}\ntrain(20)\nif rank == 1:\n    {end}\ntrain(1000)",
        *("--nproc-per-node", "2", "--max-restarts", "0", "--events", "events"),
    )
    assert agent.end() == code, agent.err
    (failed,) = told(agent, "WorkerFailed")
    assert (failed["rank"], failed["cause"]) == (1, cause)


def test_a_peer_that_ends_first_is_given_the_time_to_show_who_did(train):
    reset = "RuntimeError('gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:1')"
    agent = train(
        f"if rank == 0:\n    raise {reset}\ntime.sleep(0.3)\nos._exit(78)",
        *("--nproc-per-node", "2", "--events", "events"),
    )
    assert agent.end() == 78, agent.err
    (failed,) = told(agent, "WorkerFailed")
    assert (failed["rank"], failed["others"]) == (1, 1)


# Trains until the folder of node 0 holds a file `done`.
UNTIL_DONE = f"""{TRAINS}
say("life", os.environ["WORLD_SIZE"])
flag = torch.zeros(1)
while not flag:
    flag[0] = os.path.exists("../0/done")
    dist.all_reduce(flag)
    say("step")
    time.sleep(0.01)
"""
SOON = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,read_timeout=10")


def test_a_host_that_lost_another_one_pays_nothing_for_it(node):
    options = (*SOON, "--max-restarts", "0", "--max-host-failures", "1", "--events", "events")
    first = node(UNTIL_DONE, "1:2", *options)
    first.wait_for("step", 3)
    for lives in (2, 4):
        second = node(UNTIL_DONE, "1:2", *options)
        second.wait_for("step", 10)
        second.process.kill()
        first.wait_for("life", lives + 1)
    (first.folder / "done").touch()
    assert first.end() == 0, first.err
    assert first.said("life") == ["1", "2", "1", "2", "1"]
    chosen = [one for one in told(first, "RestartDecisionMade") if one["cause"] == "peer"]
    assert [(one["action"], one["restarts_left"]) for one in chosen] == [("Restart", 0)] * 2
    assert not told(first, "WorkerFailed")
    assert [one["rank"] for one in told(first, "RemoteRankLost")] == [0, 0]
    assert "failed first" not in first.err


@pytest.mark.parametrize("guilty", [0, 1], ids=["who serves the rendezvous", "another"])
def test_all_hosts_end_with_the_code_of_the_one_that_gives_up(node, guilty):
    script = f"{TRAINS}\ntrain(20)\nif rank == {guilty}:\n    sys.exit(78)\ntrain(2000)"
    agents = [node(script, "2", *SOON, "--events", "events") for _ in range(2)]
    assert [agent.end() for agent in agents] == [78, 78], agents[0].err + agents[1].err
    gave_up, other = sorted(agents, key=lambda one: not (one.folder / f"pid.{guilty}").exists())
    why = "exit code 78 means that another try would fail the same way"
    assert f"exit 78: {why}" in gave_up.err
    assert f"exit 78: the rendezvous is closed: the run ended on {socket.gethostname()}: {why}" in (
        other.err
    )
    assert "failed first" not in other.err
