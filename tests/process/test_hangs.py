"""Hangs found and survived, with a real agent, real ranks and real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.process.jobs import Job

OPTIONS = ("--hang-floor", "2", "--max-restarts", "2")
STEPS = ("--steps", "24", "--pause", "0.02")


def records(folder):
    lines = (folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.smoke
def test_a_stopped_rank_is_found_within_its_deadline_and_training_ends(tmp_path):
    launch = (*OPTIONS, "--events", str(tmp_path / "events"))
    with Job(tmp_path, *STEPS, launch=launch) as job:
        pid = job.wait_for_step(12, rank=1)
        os.kill(pid, signal.SIGSTOP)
        stopped_at_seconds = time.monotonic()
        while "hang: no progress" not in job.said():
            assert time.monotonic() - stopped_at_seconds < 20, job.said()
            time.sleep(0.05)
        found_seconds = time.monotonic() - stopped_at_seconds
        assert job.wait() == 0, job.said()
        said = job.said()
    hang = next(one for one in records(tmp_path) if one["event"] == "HangFound")
    assert hang["rank"] == 1
    assert hang["state"] == "stopped (SIGSTOP)"
    assert hang["deadline_seconds"] == pytest.approx(2.0)
    assert 0 < hang["median_seconds"] < 1
    # The deadline, the time between two looks, the stacks; the machine may be busy.
    assert found_seconds < 2.0 + 3.0
    # Both ranks' threads were shown before anything was killed.
    assert set(hang["stacks"]) == {"0", "1"}
    assert all("workload.py" in one["stacks"] for one in hang["stacks"].values()), hang["stacks"]
    assert "State: T (stopped)" in hang["stacks"]["1"]["kernel"]
    failed = next(one for one in records(tmp_path) if one["event"] == "WorkerFailed")
    assert (failed["rank"], failed["cause"]) == (1, "hang")
    assert "rank 1 failed first in attempt 1: hang: stopped (SIGSTOP) for" in said
    assert "attempt 2: 2 ranks (hang)" in said
    assert [one["step"] for one in job.steps()][-1] == 24


def test_a_rank_stuck_in_python_is_found_by_its_deadline_and_its_stack_says_where(train):
    agent = train(
        """
import resilient
for step in range(40):
    if step == 20 and rank == 1 and life == 1:
        def stuck_here():
            while True:
                time.sleep(0.1)
        stuck_here()
    while rank == 0 and life == 1 and step == 21:
        time.sleep(0.1)  # waits for its peer, as a collective would
    time.sleep(0.01)
    resilient.heartbeat(step)
""",
        *("--nproc-per-node", "2", "--hang-floor", "1", "--events", "events"),
    )
    assert agent.end() == 0, agent.err
    hang = next(one for one in records(agent.folder) if one["event"] == "HangFound")
    assert (hang["rank"], hang["step"]) == (1, 19)
    assert re.search(r"rank 1: main thread, innermost.*\n.*in stuck_here", agent.err)
    assert "in stuck_here (worker.py:" in agent.err


def test_who_is_never_heard_of_is_never_taken_for_hung(train):
    agent = train("time.sleep(3)", "--hang-floor", "0.2", "--hang-patience", "0.2")
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 1


def test_what_is_no_step_may_take_its_time(train):
    agent = train(
        """
import resilient
for step in range(20):
    time.sleep(0.01)
    resilient.heartbeat(step)
resilient.heartbeat()
time.sleep(3)
""",
        *("--hang-floor", "0.5"),
    )
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 1


def test_a_hang_that_comes_again_without_a_restart_left_ends_with_69(train):
    agent = train(
        """
import resilient
for step in range(10):
    time.sleep(0.01)
    resilient.heartbeat(step)
time.sleep(600)
""",
        *("--hang-floor", "0.5", "--max-restarts", "0"),
    )
    assert agent.end() == 69, agent.err
    assert len(agent.said("pid")) == 1


def test_off_is_off(train):
    agent = train(
        """
import resilient
for step in range(10):
    time.sleep(0.01)
    resilient.heartbeat(step)
time.sleep(3)
""",
        *("--hang-floor", "0.5", "--hang-deadline", "off"),
    )
    assert agent.end() == 0, agent.err
