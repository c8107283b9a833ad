"""A start by hand never ends the run of a process that is proven alive."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from resilient import Checkpointer
from resilient.checkpoint.generations import claim, read_generation
from resilient.checkpoint.resume_policy import WriterFacts, may_start
from resilient.checkpoint.writer_heartbeat import WriterHeartbeat, read_heartbeat
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.launch_env import HEARTBEAT, HEARTBEAT_SECONDS, read_launch
from resilient.distributed.start_identity import StartIdentity
from resilient.errors import IntegrityError, WriterAlive
from resilient.format.document import seal
from resilient.format.keys import generation_key
from resilient.processes import ProcessIdentity, identify
from resilient.storage.open import open_store

WRITER = """
import torch
from resilient import Checkpointer
checkpointer = Checkpointer({folder!r}, model=torch.nn.Linear(2, 2))
checkpointer.resume()
print("begun", flush=True)
input()
checkpointer.close()
print("closed", flush=True)
input()
"""


@pytest.fixture
def other():
    """Return a process that runs, as long as the test does."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def written(tmp_path, other):
    """Return a repository whose newest generation that process claimed."""
    store = open_store(str(tmp_path / "repo"))
    start = StartIdentity("abc", "slurm//7")
    claim(store, None, cause="start", clock=SystemClock(), start=start, process=identify(other.pid))
    return tmp_path / "repo"


@pytest.fixture
def begin(monkeypatch):
    """Return a function that begins a run in a fresh gang under an environment."""

    def begin_run(folder, **environ):
        with monkeypatch.context() as patched:
            patched.setattr("resilient.distributed.rank_group._own_group", [])
            for name, value in environ.items():
                patched.setenv(name, value)
            checkpointer = Checkpointer(folder, model=torch.nn.Linear(2, 2))
            checkpointer.resume()
            return checkpointer

    return begin_run


def test_may_start_refuses_a_live_stranger_and_a_job_that_is_alive_here():
    refused = [
        facts
        for values in itertools.product((False, True), repeat=6)
        if (facts := WriterFacts(*values)).is_alive >= facts.is_here and not may_start(facts)
    ]
    assert refused == [
        WriterFacts(is_alive=True),
        WriterFacts(is_alive=True, is_here=True),
        WriterFacts(is_alive=True, is_here=True, is_same_job=True),
    ]


def test_start_beside_a_live_writer_is_refused(written, other, begin):
    before = {one for one in written.rglob("*") if "events" not in one.parts}
    with pytest.raises(WriterAlive, match=f"process {other.pid} on") as told:
        begin(written)
    assert "--take-over" in told.value.hint
    assert told.value.exit_code == 80
    assert {one for one in written.rglob("*") if "events" not in one.parts} == before


def test_start_after_the_writer_was_killed_begins(written, other, begin):
    other.kill()  # Not waited for: a zombie is dead.
    while identify(other.pid) is not None:
        pass
    assert begin(written).generation == 2


@pytest.mark.parametrize(
    "environ",
    [
        {"RESILIENT_TAKE_OVER": "yes"},
        {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
        {"RESILIENT_CAUSE": "failure"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
    ],
    ids=str,
)
def test_start_by_right_beside_a_live_writer_begins(environ, written, begin):
    with pytest.raises(WriterAlive):
        begin(written, SLURM_JOB_ID="8")
    assert begin(written, **environ).generation == 2


@pytest.mark.parametrize(
    ("job", "environ"),
    [
        ("slurm//7", {"SLURM_JOB_ID": "7"}),
        ("slurm//7", {"RESILIENT_JOB": "slurm//7"}),
        ("rendezvous/run-7", {"TORCHELASTIC_RUN_ID": "run-7"}),
        ("kubernetes/train", {"RESILIENT_JOB": "kubernetes/train"}),
    ],
)
def test_second_start_in_one_job_beside_a_live_writer_is_refused(
    job, environ, tmp_path, other, begin
):
    store = open_store(str(tmp_path))
    start = StartIdentity("abc", job)
    claim(store, None, cause="start", clock=SystemClock(), start=start, process=identify(other.pid))
    with pytest.raises(WriterAlive, match=f"process {other.pid} on"):
        begin(tmp_path, **environ)
    other.kill()
    other.wait()
    assert begin(tmp_path, **environ).generation == 2


def test_start_beside_a_heartbeat_of_another_host_is_refused(tmp_path, begin):
    store = open_store(str(tmp_path))
    process = ProcessIdentity("node-2", 71, "another-boot", 5)
    record = claim(store, None, cause="start", clock=SystemClock(), process=process)
    writer = WriterHeartbeat(store, SystemClock(), print, 1.0, process)
    writer.begin(record)
    wait_for(tmp_path)
    with pytest.raises(WriterAlive, match="process 71 on"):
        begin(tmp_path)
    writer.end()
    assert begin(tmp_path).generation == 2


def wait_for(folder):
    """Return the only heartbeat in a repository, once it is there."""
    began = time.monotonic()
    while not (found := list(folder.glob("heartbeats/*.json"))):
        assert time.monotonic() - began < 60
    return found[0]


def test_heartbeat_lasts_from_the_claim_to_the_close(tmp_path, begin):
    checkpointer = begin(tmp_path, RESILIENT_JOB="nightly", **{HEARTBEAT: ""})
    token = read_generation(open_store(str(tmp_path)), 1).token
    wait_for(tmp_path)
    heartbeat = read_heartbeat(open_store(str(tmp_path)), 1, token)
    assert heartbeat is not None
    assert heartbeat.process == identify(os.getpid())
    assert (heartbeat.job, heartbeat.period_seconds) == ("nightly", HEARTBEAT_SECONDS)
    checkpointer.close()
    assert not (tmp_path / "heartbeats").exists()
    assert not [one for one in threading.enumerate() if one.name == "resilient-heartbeat"]


def test_heartbeat_switched_off_is_not_stored(tmp_path, begin):
    checkpointer = begin(tmp_path, **{HEARTBEAT: "0"})
    assert not [one for one in threading.enumerate() if one.name == "resilient-heartbeat"]
    checkpointer.close()
    assert not (tmp_path / "heartbeats").exists()


def test_restart_keeps_the_heartbeat_until_its_claim(tmp_path, begin, monkeypatch):
    """Loading may take minutes; another host sees a sign of life meanwhile."""
    seen = []
    resume = CheckpointEngine.resume

    def loading(*given, **named):
        seen.append(wait_for(tmp_path).name)
        return resume(*given, **named)

    start = StartIdentity("x", "nightly")
    claim(open_store(str(tmp_path)), None, cause="start", clock=SystemClock(), start=start)
    monkeypatch.setattr(CheckpointEngine, "resume", loading)
    checkpointer = begin(
        tmp_path, RESILIENT_JOB="nightly", RESILIENT_CAUSE="failure", **{HEARTBEAT: "5"}
    )
    assert seen[0].startswith("g000001-")
    assert checkpointer.generation == 2
    checkpointer.close()
    assert not (tmp_path / "heartbeats").exists()


def test_start_twice_in_one_process_begins(tmp_path, begin):
    assert begin(tmp_path).generation == 1
    assert begin(tmp_path).generation == 2
    record = read_generation(open_store(str(tmp_path)), 2)
    assert record.process is not None
    assert record.process.is_running_here


@pytest.mark.slow
def test_start_after_the_writer_closed_begins(tmp_path, begin):
    script = WRITER.format(folder=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        with pytest.raises(WriterAlive, match=f"process {writer.pid} on"):
            begin(tmp_path)
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "closed\n"
        assert begin(tmp_path).generation == 2
        assert writer.poll() is None


def test_liveness_other_start_time_under_the_same_number_is_dead(other):
    mine = identify(other.pid)
    assert mine is not None
    assert mine.is_running_here
    assert not replace(mine, start_ticks=mine.start_ticks - 1).is_running_here
    assert not replace(mine, host="elsewhere").is_running_here
    assert not replace(mine, boot="").is_running_here


def test_launch_reads_the_wish_to_take_over():
    assert read_launch({"RESILIENT_TAKE_OVER": "on"}).takes_over
    assert not read_launch({}).takes_over


def test_start_after_a_record_of_an_older_release_begins(tmp_path, begin):
    claim(open_store(str(tmp_path)), None, cause="start", clock=SystemClock())
    assert begin(tmp_path).generation == 2


@pytest.mark.parametrize(
    "process",
    [
        7,
        {},
        {"host": "a", "pid": True, "boot": "b", "start_ticks": 1},
        {"host": "a" * 301, "pid": 1, "boot": "b", "start_ticks": 1},
        {"host": "a", "pid": -1, "boot": "b", "start_ticks": 1},
    ],
)
def test_record_with_a_malformed_process_is_damaged(process, tmp_path):
    store = open_store(str(tmp_path))
    record = claim(store, None, cause="start", clock=SystemClock()).to_json()
    store.put(generation_key(1), seal({**record, "process": process}))
    with pytest.raises(IntegrityError, match="process"):
        read_generation(store, 1)
