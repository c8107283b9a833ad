"""Causes of failures, with real kills, a real control group and real slow ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.process import forked

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 64 << 20


@pytest.fixture
def small_group(monkeypatch):
    """Return a control group (version 1 or 2) with little memory; skip where none can be made."""
    # A forked worker shares pages with its server, and a copy of those would count here.
    monkeypatch.setattr(forked, "PLAIN", True)
    root = GROUPS if GROUPS.is_dir() else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if GROUPS.is_dir() else "memory.max"
    group = root / f"resilient-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no control group with a limit of memory can be made here: {error}")
    yield group
    group.rmdir()


def events(agent, name):
    lines = (agent.folder / "events" / "agent.jsonl").read_text(encoding="utf-8").splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == name]


def test_a_kill_for_memory_is_told_from_a_kill(train, small_group):
    agent = train(
        f"open({str(small_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(1)\n"
        "if life == 1:\n"
        "    held = [bytearray(os.urandom(1 << 20)) for _ in range(200)]\n"
        "if life == 2:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        *("--events", "events"),
    )
    assert agent.end() == 0, agent.err
    first, second = events(agent, "WorkerFailed")
    assert (first["status"], first["cause"]) == (-9, "oom_kill"), agent.err
    assert "out-of-memory kills in the control group: 1" in first["proof"]
    assert "SIGKILL by the kernel's out-of-memory killer" in agent.err
    assert (second["status"], second["cause"]) == (-9, "signal")
    assert "not the out-of-memory killer" in second["proof"]


@pytest.mark.parametrize(
    ("death", "code", "cause", "words"),
    [
        (
            "[bytearray(os.urandom(1 << 20)) for _ in range(200)]",
            *(137, "oom_kill", "SIGKILL by the kernel's out-of-memory killer"),
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            *(75, "signal", "SIGKILL (not the out-of-memory killer"),
        ),
    ],
    ids=["for memory", "from outside"],
)
def test_a_stop_tells_a_kill_for_memory_from_a_rank_that_was_taken(
    train, small_group, death, code, cause, words
):
    agent = train(
        "os.makedirs('repo/checkpoint-20-g1')\n"
        "open('repo/checkpoint-20-g1/manifest.json', 'w').close()\n"
        f"open({str(small_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {death})\n"
        "time.sleep(1)\n"
        "say('ready')\n"
        "time.sleep(600)\n",
        *("--events", "events", "--repo", "repo"),
    )
    agent.wait_for("ready", 1)
    agent.send(signal.SIGTERM)
    assert agent.end() == code, agent.err
    (told,) = events(agent, "WorkerFailed")
    assert told["cause"] == cause
    assert words in agent.err


@pytest.mark.smoke
def test_causes_of_failures_are_told_as_one_word(train):
    agent = train(
        "from resilient.errors import PeerFailed\n"
        "if life == 1:\n"
        "    raise OSError(28, 'No space left on device')\n"
        "if life == 2:\n"
        "    sys.exit(9)\n"
        "if life == 3:\n"
        "    os.abort()\n",
        *("--events", "events", "--max-no-progress", "0"),
    )
    assert agent.end() == 0, agent.err
    assert [one["cause"] for one in events(agent, "WorkerFailed")] == [
        "disk_full",
        "exit",
        "signal",
    ]


def test_a_slow_rank_is_told_and_left_alone(train):
    agent = train(
        """
from resilient.distributed.heartbeat import progress_reporter
from resilient.distributed.heartbeat import Phase
pulse = progress_reporter()
pulse.enter(Phase.FIRST)
for step in range(60):
    pulse.begin_step()
    time.sleep(0.06 if rank == 1 else 0.005)
    pulse.need_others()
    time.sleep(0.0 if rank == 1 else 0.055)
    pulse.end_step(step)
""",
        *("--nproc-per-node", "3", "--events", "events"),
    )
    assert agent.end() == 0, agent.err
    assert len(agent.said("pid")) == 3
    assert {one["rank"] for one in events(agent, "StragglerFound")} == {1}
