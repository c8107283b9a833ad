"""A rank that SIGKILL hits while the run is being stopped: which code, what is said, how soon."""

import json
import os
import signal
import time

import pytest

SAVED = """
if rank == 0:
    os.makedirs("repo/checkpoint-20-g1", exist_ok=True)
    open("repo/checkpoint-20-g1/manifest.json", "w").close()
"""
DIES = """
def stop(number, frame):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    {survivor}

signal.signal(signal.SIGTERM, stop)
say("ready")
while True:
    time.sleep(0.05)
"""
WAITS = "pass"  # for a peer that will never come
FAILS = "time.sleep(0.5); sys.exit(1)"  # as a collective does that loses a peer
SAVES = "time.sleep(0.5); sys.exit(75)"
GRACE_SECONDS = 10.0
TWO = ("--nproc-per-node", "2", "--repo", "repo", "--grace", str(GRACE_SECONDS), "--events", "e")


def told(agent, name):
    lines = (agent.folder / "e" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return next(one for one in map(json.loads, lines) if one["event"] == name)


def spare_seconds(agent):
    """Return what a stop had left when all was done but the end of the agent's interpreter.

    How long that takes is the machine's business: a very busy one needs seconds for it.
    """
    asked = told(agent, "StopRequested")
    return asked["monotonic"] + asked["grace_seconds"] - told(agent, "RunEnded")["monotonic"]


@pytest.mark.smoke
@pytest.mark.parametrize("survivor", [WAITS, FAILS, SAVES], ids=["waits", "fails", "saves"])
def test_a_killed_rank_of_a_stopped_run_ends_it_with_75_where_something_is_committed(
    train, survivor
):
    agent = train(SAVED + DIES.format(survivor=survivor), *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err
    assert spare_seconds(agent) > 0, "it left within the deadline"
    failed = told(agent, "WorkerFailed")
    assert (failed["rank"], failed["status"]) == (1, -9), agent.err
    assert "rank 1 failed first in attempt 1: SIGKILL" in agent.err
    assert "at most the work since checkpoint-20-g1 is lost" in agent.err


def test_a_killed_rank_of_a_stopped_run_that_saved_nothing_passes_its_signal_on(train):
    script = "os.makedirs('repo', exist_ok=True)\n" + DIES.format(survivor=FAILS)
    agent = train(script, *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 137, agent.err
    assert "during the stop, and nothing was committed yet" in agent.err


def test_a_rank_that_fails_by_itself_while_stopping_is_no_preemption(train):
    script = DIES.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(9)")
    agent = train(SAVED + script.format(survivor="sys.exit(75)"), *TWO)
    agent.wait_for("ready", 2)
    agent.send(signal.SIGTERM)
    assert agent.end() == 9, agent.err
    assert "a worker failed while stopping, with exit code 9" in agent.err


def test_a_rank_that_is_killed_beside_one_that_leaves_preempted_costs_no_restart(train):
    script = """
say("ready")
while rank == 1:
    time.sleep(0.05)
time.sleep(0.3)
sys.exit(75)
"""
    agent = train(SAVED + script, *TWO)
    agent.wait_for("ready", 2)
    time.sleep(2.0)
    victim = [int(one) for one in (agent.folder / "pid.1").read_text().split()][-1]
    os.kill(victim, signal.SIGKILL)
    assert agent.end() == 75, agent.err
    assert len(agent.said("pid")) == 2


def test_a_notice_that_is_heard_after_the_kill_counts_where_no_restart_is_left(train):
    script = """
say("ready")
if rank == 1:
    time.sleep(1.0)
    open("notice", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.05)
"""
    agent = train(SAVED + script, *TWO, "--notice", "file:notice", "--max-restarts", "0")
    assert agent.end() == 75, agent.err
    assert "at most the work since checkpoint-20-g1 is lost" in agent.err


def test_a_kill_that_nothing_explains_passes_its_signal_on_where_no_restart_is_left(train):
    script = """
say("ready")
while True:
    time.sleep(0.5)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    agent = train(SAVED + script, *TWO, "--max-restarts", "0")
    assert agent.end() == 137, agent.err
