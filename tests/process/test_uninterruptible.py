"""A rank in state D, which no signal ends, and that goes on after it was given up on.

The freezer of control groups, version 1, makes one: SIGKILL waits until the group is thawed.
(Version 2 lets SIGKILL through.)
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.agent_harness import wait_until

# What the agent waits for a rank that it has killed.
KILL_SECONDS = 5.0
FREEZER = Path("/sys/fs/cgroup/freezer")
# Once thawed it would end with 0 if nothing had hit it meanwhile.
SCRIPT = """
import resilient
resilient.heartbeat(0)
for step in range(1, 20):
    time.sleep(0.02)
    resilient.heartbeat(step)
say("ready")
while not os.path.exists("enough"):
    time.sleep(0.02)
    step += 1
    resilient.heartbeat(step)
"""
OPTIONS = ("--hang-deadline", "1.5", "--hang-floor", "1", "--max-restarts", "0", "--events", "e")


class Freezer:
    def __init__(self, folder):
        self._folder = folder

    def freeze(self, pid):
        (self._folder / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"

    def thaw(self):
        self._set("THAWED")

    def _set(self, state):
        (self._folder / "freezer.state").write_text(state)
        began = time.monotonic()
        while (self._folder / "freezer.state").read_text().strip() != state:
            assert time.monotonic() - began < 20, state
            time.sleep(0.01)


@pytest.fixture
def freezer():
    """Return a group that can be frozen; skip where none can be made."""
    folder = FREEZER / f"resilient-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "freezer.state").write_text("THAWED")
    except OSError as error:
        pytest.skip(f"no freezer of control groups (version 1) here: {error}")
    found = Freezer(folder)
    yield found
    found.thaw()
    # A member that is gone for its parent may be there a moment longer.
    began = time.monotonic()
    while (folder / "cgroup.procs").read_text():
        assert time.monotonic() - began < 20, "a member lives"
        time.sleep(0.01)
    folder.rmdir()


def frozen(train, freezer, *options):
    agent = train(SCRIPT, *OPTIONS, *options)
    agent.wait_for("ready", 1)
    freezer.freeze(int(agent.said("pid")[0]))
    (agent.folder / "enough").touch()
    return agent


def facts(agent, name):
    lines = (agent.folder / "e" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def test_a_rank_that_cannot_be_killed_makes_the_agent_leave_the_host(train, freezer):
    agent = frozen(train, freezer)
    assert agent.end() == 71, agent.err
    (hang,) = facts(agent, "HangFound")
    assert hang["state"] == "stuck in the kernel (D)"
    assert "a worker of this host cannot be killed: start on another host" in agent.err


@pytest.mark.parametrize("moment", ["the kill was sent", "it was given up on"])
def test_a_rank_that_goes_on_after_its_hang_was_told_is_no_success(train, freezer, moment):
    agent = frozen(train, freezer)
    wait_until(lambda: facts(agent, "HangFound"), "the hang", agent)
    pid = int(agent.said("pid")[0])
    wait_until(lambda: _is_killed(pid), "SIGKILL", agent)
    if moment == "it was given up on":
        time.sleep(KILL_SECONDS + 1.5)
    freezer.thaw()
    # The deadline of a hang where it died in time, else the host that is left.
    assert agent.end() == (69 if moment == "the kill was sent" else 71), agent.err
    assert not facts(agent, "RunEnded")


def test_a_stop_that_meets_a_rank_in_the_kernel_leaves_and_says_that_work_was_lost(train, freezer):
    agent = frozen(train, freezer, "--hang-deadline", "off", "--grace", "1")
    agent.send(signal.SIGTERM)
    assert agent.end() == 143, agent.err
    assert "workers had to be killed before they had saved" in agent.err


def _is_killed(pid):
    """Whether SIGKILL waits for a process, or has ended it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return True
    waiting = next(line for line in status.splitlines() if line.startswith("ShdPnd")).split()[1]
    return bool(int(waiting, 16) >> (signal.SIGKILL - 1) & 1)
