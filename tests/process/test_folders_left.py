"""What an agent leaves that was killed: its folder, and a run that is dead."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.agent_harness import wait_until

WAITS = "say('ready')\ntime.sleep(60)"


@pytest.mark.smoke
def test_the_folder_of_a_killed_agent_goes_with_the_next_one(train, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {"TMPDIR": str(temporary)}
    living = train(WAITS, environ=environ)
    living.wait_for("ready", 1)
    (kept,) = temporary.glob("resilient-agent-*")
    killed = train(WAITS, environ=environ)
    killed.wait_for("ready", 1)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    assert len([*temporary.glob("resilient-agent-*")]) == 2
    just_made = temporary / "resilient-agent-made"
    just_made.mkdir()
    (just_made / "note").touch()
    assert train("say('done')", environ=environ).end() == 0
    assert {*temporary.glob("resilient-agent-*")} == {kept, just_made}
    assert any(kept.iterdir())


def state_of(agent):
    command = [sys.executable, "-m", "resilient_cli", "status", str(agent.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["state"]


def test_a_run_whose_agent_was_killed_is_called_dead_in_seconds(train):
    agent = train(WAITS, "--events", "events")
    agent.wait_for("ready", 1)
    assert state_of(agent) != "dead"
    os.kill(agent.process.pid, signal.SIGKILL)
    agent.process.wait()
    wait_until(lambda: state_of(agent) == "dead", "the run to be called dead", seconds=20)
