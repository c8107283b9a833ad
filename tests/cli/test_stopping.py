"""``resilient stop``: whom it finds, whom it does not, and what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest

from resilient.clock import boot_name
from resilient.goodput.event_log import Agent
from resilient_cli.liveness import is_agent_alive, is_alive

# What a launcher does: it leaves its last word when it is asked to.
OBEYS = """
import os, signal, sys, time
def leave(*_):
    with open(sys.argv[1], "a") as file:
        file.write(sys.argv[2].replace("PID", str(os.getpid())) + "\\n")
    sys.exit(75)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
seen = []
def count(*_):
    seen.append(1)
    if len(seen) == 2:
        raise SystemExit(143)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, count)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def word(event, pid, host="", later=0, **fields):
    at = (datetime.now(UTC) + timedelta(seconds=later)).isoformat(timespec="milliseconds")
    agent = f"{host or socket.gethostname()}:{pid}"
    return json.dumps({"at": at, "event": event, "agent": agent, **fields})


@pytest.fixture
def launcher(tmp_path):
    """Start a process in the place of a launcher and tell of it."""
    started = []

    def start(code):
        file = tmp_path / "agent.jsonl"
        end = word("RunEnded", "PID", later=60, exit_code=75, reason="preempted: 3 steps saved")
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(file), end], stdout=subprocess.PIPE
        )
        started.append(process)
        process.stdout.readline()
        file.write_text(word("AgentStarted", process.pid) + "\n", encoding="utf-8")
        return process

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def reap(process):
    """Collect it as its shell would: a zombie has ended, but for its parent."""
    return process.wait(60)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_launcher_is_asked_and_its_last_word_is_told(form, launcher, tmp_path, call):
    process = launcher(OBEYS)
    outcome = call("stop", tmp_path, *form)
    assert outcome.status == 0, outcome.stderr
    assert reap(process) == 75
    if form:
        (agent,) = json.loads(outcome.stdout)["agents"]
        assert (agent["pid"], agent["exit_code"]) == (process.pid, 75)
    else:
        assert outcome.stdout == f"pid {process.pid}: exit 75, preempted: 3 steps saved\n"


def test_now_asks_twice(launcher, tmp_path, call):
    process = launcher(STUBBORN)
    assert call("stop", tmp_path, "--now").status == 0
    assert reap(process) == 143


def test_one_that_takes_longer_is_told_and_left_alone(launcher, tmp_path, call):
    process = launcher(STUBBORN)
    outcome = call("stop", tmp_path, "--within", "0.3")
    assert outcome.status == 69
    assert "resilient stop --now" in outcome.stderr
    assert process.poll() is None


def test_no_wait_only_asks(launcher, tmp_path, call):
    process = launcher(STUBBORN)
    outcome = call("stop", tmp_path, "--within", "0")
    assert outcome.stdout == f"pid {process.pid}: asked to save and exit\n"


def test_a_launcher_that_was_killed_or_ended_is_not_running(tmp_path, call):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    file = tmp_path / "agent.jsonl"
    file.write_text(word("AgentStarted", gone.pid) + "\n", encoding="utf-8")
    outcome = call("stop", tmp_path)
    assert (outcome.status, "RES-RUN-404" in outcome.stderr) == (66, True)


def test_a_launcher_of_another_machine_is_named(tmp_path, call):
    file = tmp_path / "agent.jsonl"
    file.write_text(word("AgentStarted", os.getpid(), "elsewhere") + "\n", encoding="utf-8")
    outcome = call("stop", tmp_path)
    assert outcome.status == 66
    assert f"ssh elsewhere resilient stop {tmp_path}" in outcome.stderr


def test_a_process_that_took_a_dead_one_s_number_is_not_signalled(tmp_path, call):
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    try:
        told = json.loads(word("AgentStarted", os.getpid()))
        told["at"] = "2020-01-01T00:00:00.000Z"
        (tmp_path / "agent.jsonl").write_text(json.dumps(told) + "\n", encoding="utf-8")
        assert call("stop", tmp_path).status == 66
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not asked


@pytest.mark.parametrize("later", [-86_400, 86_400], ids=["set forward", "set back"])
def test_a_clock_that_was_set_since_hides_no_launcher(later, launcher, tmp_path, call):
    process = launcher(OBEYS)
    steady = {"boot": boot_name(), "monotonic": time.monotonic()}
    told = word("AgentStarted", process.pid, later=later, **steady)
    (tmp_path / "agent.jsonl").write_text(told + "\n", encoding="utf-8")
    assert call("stop", tmp_path, "--within", "0").status == 0
    assert reap(process) == 75


@pytest.mark.parametrize(
    "steady",
    [{"boot": "another", "monotonic": 1e9}, {"boot": boot_name(), "monotonic": 0.0}],
    ids=["at another start of the machine", "before this process began"],
)
def test_a_process_that_took_a_number_since_is_another_whatever_the_clock_says(
    steady, launcher, tmp_path, call
):
    process = launcher(OBEYS)
    told = word("AgentStarted", process.pid, later=60, **steady)
    (tmp_path / "agent.jsonl").write_text(told + "\n", encoding="utf-8")
    assert call("stop", tmp_path).status == 66
    assert process.poll() is None


def test_a_launcher_that_tells_no_steady_seconds_is_known_by_the_time_of_day():
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    host, pid = socket.gethostname(), os.getpid()
    assert is_agent_alive(Agent(host, pid, now_ms))
    assert not is_agent_alive(Agent(host, pid, now_ms - 86_400_000_000))


def test_a_zombie_does_not_live():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    deadline = time.monotonic() + 60
    while is_alive(ended.pid, now_ms) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(ended.pid, now_ms)
    ended.wait()
    assert is_alive(os.getpid(), now_ms)
