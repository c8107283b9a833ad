"""`resilient chaos run --hosts`: a real training on namespaces that are cut off and lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = str(Path(__file__).with_name("canonical_job.py"))
# Silence for 6 s is death; torch's own 15 s and 60 s would make this long.
CONF = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3,read_timeout=15"
# Draws host 1, host 1 again, and host 0, at which they meet.
SEED = 1
PLAN = """
[[fault]]
kind = "cut"
seconds = 11
at = 0.15

[[fault]]
kind = "kill"
target = "host"
seconds = 1
at = 0.45

[[fault]]
kind = "kill"
target = "host"
seconds = 1
at = 0.7
"""


def chaos(tmp_path, hosts, plan, *command):
    (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
    words = ("run", str(tmp_path / "plan.toml"), "--hosts", str(hosts), "--seed", str(SEED))
    words += ("--within", "100", "--folder", str(tmp_path / "runs"), "--", "train")
    return subprocess.run(
        [sys.executable, "-m", "resilient_cli", "--json", "chaos", *words, *command],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )


@pytest.mark.usefixtures("can_make_hosts")
def test_a_training_on_two_hosts_outlives_a_cut_and_the_loss_of_either(tmp_path):
    train = ("--nnodes", "1:2", "--rdzv-conf", CONF, "--grace", "5", SCRIPT)
    job = ("rank", "{folder}/out", "0.2", json.dumps({"max_steps": 40}))
    ended = chaos(tmp_path, 2, PLAN, *train, *job)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdict = json.loads(ended.stdout)
    assert verdict["missed"] == []
    assert verdict["hosts"] == 2
    faults = verdict["faults"]
    assert [(one["kind"], one["host"]) for one in faults] == [
        ("cut", "host-1"),
        ("kill", "host-1"),
        ("kill", "host-0"),
    ]
    # The cut host leaves, or meets the other one again: that hangs on what it was waiting for.
    assert faults[0]["ends"] in ([], [{"host": "host-1", "exit": 69}])
    assert faults[1]["ends"] == [{"host": "host-1", "exit": 137}]
    assert sorted((one["host"], one["exit"]) for one in faults[2]["ends"]) == [
        ("host-0", 137),
        ("host-1", 69),
    ]
    assert all(one["restored"] for one in faults)
    states = {one["name"]: one["state"] for one in verdict["promises"]}
    untested = {name for name, state in states.items() if state != "kept"}
    assert untested == {"detection", "one_writer"}
    # Who waited for host 0 says that it is gone, also where the rendezvous went with it.
    last = tmp_path / "runs" / "struck" / "events" / "host-1" / "agent.jsonl"
    gone = [one for one in map(json.loads, last.read_text().splitlines()) if "agents" in one]
    assert "10.0.0.1" in [*gone[-1]["agents"], *gone[-1]["hosts"]]
    # Else all of this went unnoticed, and proves nothing.
    told = (tmp_path / "runs" / "struck" / "events" / "host-0" / "agent.jsonl").read_text()
    worlds = [
        one["world_size"]
        for one in map(json.loads, told.splitlines())
        if one["event"] == "WorkerGroupStarted"
    ]
    assert 1 in worlds
    assert worlds[-1] == 2
