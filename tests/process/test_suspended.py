"""A job that a scheduler suspends and lets go on: agent and ranks stand still together."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

FLOOR_SECONDS = 2.0
AWAY_SECONDS = 6.0


@pytest.mark.smoke
def test_a_job_that_was_suspended_goes_on_and_nobody_is_blamed(train):
    agent = train(
        """
import resilient
resilient.heartbeat(0)
for step in range(1, 30):
    say("began", step)
    # Work, and no single sleep: that would be over at once after a suspension.
    for _ in range(30 if step > 10 else 2):
        time.sleep(0.05)
    resilient.heartbeat(step)
    if step == 14:
        break
""",
        *("--nproc-per-node", "2", "--hang-floor", str(FLOOR_SECONDS), "--events", "events"),
    )
    deadline = time.monotonic() + 60
    while "11" not in agent.said("began"):
        assert time.monotonic() < deadline, agent.err
        time.sleep(0.01)
    ranks = [int(pid) for pid in agent.said("pid")]
    for pid in (agent.process.pid, *ranks):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(AWAY_SECONDS)
    for pid in (*ranks, agent.process.pid):
        os.kill(pid, signal.SIGCONT)
    assert agent.end() == 0, agent.err
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    assert not [one for one in told if one["event"] == "HangFound"], agent.err
    away = [one for one in told if one["event"] == "AgentSuspended"]
    assert max(one["seconds"] for one in away) > AWAY_SECONDS - 1, agent.err
    assert len(agent.said("pid")) == 2
