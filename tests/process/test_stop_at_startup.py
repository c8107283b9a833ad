"""SIGTERM while `resilient train` still starts: nothing is lost, and the code says so."""

import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.agent_harness import catches, wait_until

SCRIPT = """
say("ready")
time.sleep(600)
"""


def start(train, *options):
    """Start an agent and return it once it remembers signals, long before it has imported all."""
    agent = train(SCRIPT, *options)
    # The agent installs this handler last.
    wait_until(lambda: catches(agent.process.pid, signal.SIGUSR2), "its handlers", agent, 20)
    return agent


@pytest.mark.parametrize("delay_seconds", [0.0, 0.1, 0.3, 0.6, 1.2])
def test_a_stop_before_the_first_life_ends_with_75(train, delay_seconds):
    agent = start(train)
    time.sleep(delay_seconds)
    agent.send(signal.SIGTERM)
    assert agent.end() == 75, agent.err


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_every_order_and_notice_is_heard_that_early(train, number):
    agent = start(train, "--requeue-exit-code", "99")
    agent.send(number)
    assert agent.end() == 99, agent.err
    assert not agent.said("ready")


def test_a_plan_that_is_only_printed_can_be_ended(train):
    agent = start(train, "--dry-run")
    agent.send(signal.SIGTERM)
    assert agent.end() == -signal.SIGTERM


def test_it_listens_before_anything_takes_time():
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, resilient_cli.__main__, resilient_cli.process_exit; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    bare = subprocess.run(
        [
            sys.executable,
            "-c",
            "import __future__, sys, collections.abc, signal, typing; print(*sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    more = set(ended.stdout.split()) - set(bare.stdout.split())
    assert more == {"resilient_cli", "resilient_cli.__main__", "resilient_cli.process_exit"}


def test_it_listens_before_the_program_itself_is_imported():
    watch = """
import signal, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "resilient_cli.app":
            print(signal.getsignal(signal.SIGTERM).__module__)
sys.meta_path.insert(0, Watch())
sys.argv[1:] = ["train", "nowhere.py"]
from resilient_cli.__main__ import main
sys.exit(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", watch], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (66, "resilient_cli.process_exit\n"), ended.stderr
