"""A Trainer under `resilient train` that is asked to stop: who was told, and how long it has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store
from tests.process.jobs import Job, run


def tree(pid: int) -> list[int]:
    """Return the process and everything below it, as a control group would hold it."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [pid, *(below for child in children for below in tree(child))]


@pytest.mark.parametrize("loaders", ["0", "2"])
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_process_tree_saves_the_last_step(tmp_path, asked, loaders):
    options = ("--steps", "100000", "--save-steps", "100000", "--pause", "0.05")
    with Job(tmp_path, *options, "--workers", loaders) as job:
        job.wait_for_step(6)
        job.wait_for_step(6, rank=1)
        for pid in tree(job.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, asked)
        assert job.wait() == 75, job.said()
        last = {job.steps(rank)[-1]["step"] for rank in range(2)}
    assert {committed(open_store(str(tmp_path)))[0].step} == last


def test_the_grace_of_the_agent_counts_and_not_that_of_the_script(tmp_path):
    options = ("--steps", "100000", "--pause", "3", "--grace", "1")
    with Job(tmp_path, *options, launch=("--grace", "60")) as job:
        job.wait_for_step(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.said()
        assert "exited at once" not in job.said()


def test_work_that_was_lost_at_the_deadline_is_not_reported_as_saved(tmp_path):
    options = ("--steps", "100000", "--pause", "16", "--grace", "1")
    with Job(tmp_path, *options, launch=("--grace", "10")) as job:
        job.wait_for_step(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.said()
        assert "exited at once" in job.said()
        assert "work since the last checkpoint is lost" in job.said()
        assert "same command resumes" in job.said()


def test_a_crash_loop_is_told_although_only_the_script_names_the_repository(tmp_path):
    options = ("--steps", "24", "--save-steps", "4", "--die-at", "6")
    code, said = run(tmp_path, *options, launch=("--max-restarts", "9"))
    assert code == 70, said
    assert "crash loop: 3 attempts in a row" in said
    assert "checkpoint-4-g1 is committed" in said


def test_resilient_stop_saves_the_last_step_and_waits_for_the_end(tmp_path):
    options = ("--steps", "100000", "--save-steps", "100000", "--pause", "0.05")
    events = tmp_path / "events"
    with Job(tmp_path, *options, launch=("--events", str(events))) as job:
        job.wait_for_step(6)
        asked = subprocess.Popen(
            [sys.executable, "-m", "resilient_cli", "stop", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        # It waits for the launcher, and the launcher for its parent, which is here.
        assert job.wait() == 75, job.said()
        said, _ = asked.communicate(timeout=120)
        last = job.steps()[-1]["step"]
    assert (asked.returncode, f"pid {job.process.pid}: exit 75" in said) == (0, True)
    assert committed(open_store(str(tmp_path)))[0].step == last


def keeper_of(job: Job) -> int:
    """Return the keeper's process of an agent."""
    pids = tree(job.process.pid)
    return next(
        pid for pid in pids if b"checkpoint.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


@pytest.mark.parametrize("save_steps", ["100000", "1"])
def test_a_keeper_that_is_stopped_costs_a_preemption_no_step(tmp_path, save_steps):
    options = ("--steps", "100000", "--save-steps", save_steps, "--pause", "0.05")
    with Job(tmp_path, *options, launch=("--grace", "12")) as job:
        job.wait_for_step(6)
        job.wait_for_step(6, rank=1)
        keeper = keeper_of(job)
        os.kill(keeper, signal.SIGSTOP)
        try:
            time.sleep(0.5)
            began = time.monotonic()
            job.process.send_signal(signal.SIGTERM)
            assert job.wait() == 75, job.said()
            assert time.monotonic() - began < 12 + 8
        finally:
            with suppress(ProcessLookupError):
                os.kill(keeper, signal.SIGKILL)
        last = {job.steps(rank)[-1]["step"] for rank in range(2)}
    assert {committed(open_store(str(tmp_path)))[0].step} == last
