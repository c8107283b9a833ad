"""Reactions of a real agent: budgets, waits, and what a failing host is worth."""

import signal
import time

import pytest

from tests.helpers.agent_harness import wait_until

COMMIT = """
folder = f'repo/checkpoint-{life}-g1'
os.makedirs(folder)
open(folder + '/manifest.json', 'w').close()
"""


def test_failures_that_are_far_apart_never_use_up_the_restarts(train):
    agent = train(
        f"{COMMIT}\ntime.sleep(1.0)\nsys.exit(1 if life < 5 else 0)",
        *("--max-restarts", "1", "--restart-window", "1", "--repo", "repo"),
    )
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 5


def test_a_wait_before_the_next_try_is_told_and_ends_with_a_stop(train):
    agent = train(
        "os.makedirs('repo', exist_ok=True)\nsys.exit(1)", "--repo", "repo", "--max-restarts", "9"
    )
    wait_until(lambda: "restart as attempt 3 in " in agent.err, "a wait", agent)
    agent.send(signal.SIGTERM)
    began = time.monotonic()
    assert agent.end() == 75, agent.err
    assert time.monotonic() - began < 10
    assert "asked to stop during a wait" in agent.err, "and no life was begun to be stopped"
    assert len(agent.said("pid")) == 2


@pytest.mark.smoke
def test_interruptions_of_earlier_launches_count(train, tmp_path):
    script = """
import resilient
checkpointer = resilient.Checkpointer("repo", step=0)
checkpointer.resume()
checkpointer.save(life)
checkpointer.close()
sys.exit(75)
"""
    options = ("--repo", str(tmp_path / "repo"), "--max-preemptions", "2", "--single-writer")
    codes = []
    for _ in range(3):
        agent = train(script, *options)
        codes.append(agent.end())
    assert codes == [75, 75, 143], agent.err
    assert "preempted more often than --max-preemptions allows" in agent.err
