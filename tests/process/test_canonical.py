"""Canonical reduction: one digest at any world size, and after any resizes, by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.process.canonical_job import digest

JOB = Path(__file__).with_name("canonical_job.py")
PATIENCE_SECONDS = 200


def job(mode, folder, told, **options):
    """Run one mode of the job in a process of its own, and return what it found."""
    ended = subprocess.run(
        [sys.executable, str(JOB), mode, str(folder), told, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The digest of a run of one rank."""
    return job("sizes", tmp_path_factory.mktemp("alone"), "1")["1"]


@pytest.mark.long
def test_any_number_of_ranks_ends_with_one_digest(tmp_path, alone):
    assert job("sizes", tmp_path, "2,3,4,5,7") == dict.fromkeys("23457", alone)


def test_a_sharded_optimizer_ends_with_the_same_digest(tmp_path, alone):
    found = job("sizes", tmp_path, "1,2,3,5", shard_optimizer_state=True)
    assert found == dict.fromkeys("1235", alone)


@pytest.mark.smoke
def test_more_ranks_than_micro_batches_end_with_the_digest_of_one(tmp_path):
    few = {"global_train_batch_size": 4, "max_steps": 5}
    found = job("sizes", tmp_path, "1,3", **few)
    assert found["1"] == found["3"]


def test_loader_processes_and_small_windows_change_no_bit(tmp_path, alone):
    options = {"dataloader_num_workers": 1, "ddp_bucket_cap_mb": 0.05}
    assert job("sizes", tmp_path, "2", **options) == {"2": alone}


@pytest.mark.long
def test_ten_random_faults_at_random_world_sizes_leave_no_trace(tmp_path):
    """With the optimizer sharded; the resized run below has it whole."""
    found = job("storm", tmp_path, "10,7", shard_optimizer_state=True)
    assert found["struck"] == found["calm"], found["faults"]


def test_a_run_resized_4_3_5_2_7_by_kills_ends_with_the_digest_of_one(tmp_path, alone):
    assert job("resized", tmp_path, "4,3,5,2,7", shard_optimizer_state=False) == alone


@pytest.mark.long
def test_a_launcher_that_is_killed_goes_on_with_another_number_of_ranks(tmp_path, alone):
    beats = tmp_path / "beats"
    with launched(tmp_path, 2, pause=0.1) as process:
        wait_for(lambda: reached(beats) >= 3, process)
        os.killpg(process.pid, signal.SIGKILL)
    with launched(tmp_path, 3, pause=0.0) as process:
        assert process.wait(PATIENCE_SECONDS) == 0
    assert digest(tmp_path) == alone


def launched(folder, size, pause):
    """Start the job under the launcher."""
    rank = [str(JOB), "rank", str(folder), str(pause), "{}"]
    command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", str(size)]
    return Launched([*command, *rank])


class Launched:
    """A process group that is gone at the end."""

    def __init__(self, command):
        self._command = command

    def __enter__(self):
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._process

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def reached(beats):
    return max(map(int, beats.read_text().split())) if beats.exists() else 0


def wait_for(holds, process):
    began = time.monotonic()
    while not holds():
        assert process.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < began + PATIENCE_SECONDS
        time.sleep(0.01)
