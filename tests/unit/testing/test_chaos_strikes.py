"""The parts of chaos that touch a machine: its processes, its files, its disks."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest

from resilient.clock import SystemClock
from resilient.errors import ConfigError
from resilient.testing.chaos.injectors import flip_bit
from resilient.testing.chaos.job import FOLDER, Job, JobFailed
from resilient.testing.chaos.processes import children, descendants, is_running, kill_all
from resilient.testing.chaos.runner import clear

FAMILY = """
import os, sys, time
child = os.fork()
if child:
    print(os.getpid(), child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def family():
    """Start a process with a child, and end both."""
    command = [sys.executable, "-S", "-c", FAMILY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(one) for one in parent.stdout.readline().split()]
        yield pids
        kill_all(parent.pid)


def test_whoever_is_below_a_process_is_found_and_killed_with_it(family):
    parent, child = family
    assert children(parent) == [child]
    assert {parent, child} <= set(descendants(os.getpid()))
    assert is_running(child)
    assert kill_all(parent) == [parent, child]
    os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
    assert not is_running(parent)


def test_who_is_gone_has_no_children():
    assert children(2**22 + 1) == []
    assert not is_running(2**22 + 1)


@pytest.mark.parametrize("seed", range(5))
def test_one_bit_is_flipped_and_no_other(tmp_path, seed):
    path = tmp_path / "file"
    content = bytes(range(100))
    path.write_bytes(content)
    flip_bit(path, Random(seed))
    changed = [a ^ b for a, b in zip(path.read_bytes(), content, strict=True)]
    assert sum(one.bit_count() for one in changed) == 1


def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path):
    clear(tmp_path / "chaos-run")
    (tmp_path / "chaos-run" / "calm" / "said.txt").write_text("of an earlier one")
    clear(tmp_path / "chaos-run")
    assert list((tmp_path / "chaos-run" / "calm").iterdir()) == []
    (tmp_path / "chaos-run" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"`thesis\.tex`, which no experiment created"):
        clear(tmp_path / "chaos-run")
    assert (tmp_path / "chaos-run" / "calm").is_dir()


def test_a_job_has_its_folder_in_its_command_and_the_users_options_last(tmp_path):
    words = ("--max-restarts", "1", "train.py", f"--out={FOLDER}/x")
    job = Job(tmp_path, tmp_path / "repository", ("--max-restarts", "9"), words, SystemClock())
    command = job.hosts[0]._command
    assert command[-1] == f"--out={tmp_path}/x"
    assert command.index("9") < command.index("1")
    assert command[command.index("--repo") + 1] == str(tmp_path / "repository")
    assert (job.newest(), job.is_saving(), job.facts()) == (None, False, [])


def test_a_wait_ends_with_the_job_or_in_time(tmp_path):
    script = tmp_path / "missing.py"
    job = Job(tmp_path, tmp_path / "repository", (), (str(script),), SystemClock())
    job.start()
    assert job.wait(60) == 66
    assert "no script" in job.hosts[0].output_path.read_text()
    sleeper = Job(tmp_path, tmp_path / "repository", (), (str(script),), SystemClock())
    sleeper.hosts[0]._command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    sleeper.start()
    with pytest.raises(JobFailed, match=r"within 0\.1 s"):
        sleeper.wait(0.1)
    sleeper.kill()
    assert sleeper.code() == 137
