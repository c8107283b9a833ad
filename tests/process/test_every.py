"""`resilient train --every`: ranks that are killed save at times, all of them the same steps."""

from __future__ import annotations

import json
import os
import signal

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.format.keys import parse_checkpoint
from resilient.storage.local import LocalStore
from tests.process.jobs import Job

OPTIONS = ("--steps", "60", "--pause", "0.05", "--save-steps", "1000")


def told(folder, event):
    lines = [
        json.loads(line)
        for path in sorted((folder / "events").glob("rank-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [one for one in lines if one["event"] == event]


def test_two_ranks_save_by_time_through_a_kill(tmp_path):
    launch = ("--events", str(tmp_path / "events"), "--every", "0.5s")
    with Job(tmp_path, *OPTIONS, launch=launch) as job:
        os.kill(job.wait_for_step(30, rank=1), signal.SIGKILL)
        assert job.wait() == 0, job.said()
        said = job.said()
    plans, saves = told(tmp_path, "SaveScheduleChosen"), told(tmp_path, "CheckpointCommitted")
    assert [one["generation"] for one in plans] == [1, 2], said
    assert {one["rank"] for one in plans} == {0}
    assert [one["interval_seconds"] for one in plans] == [0.5, 0.5]
    assert all(one["step_seconds"] > 0.02 for one in plans)
    steps = {parse_checkpoint(one["checkpoint"]).step for one in saves}
    # Most steps take longer than their pause, so half a second has room for few of them.
    assert len(steps - {60}) >= 3, said
    # Each of them holds the files of both, which a rank that saved elsewhere would lack.
    store = LocalStore(tmp_path)
    kept = [read_manifest(store, one) for one in committed(store)]
    assert kept
    assert all({file.rank for file in one.files} == {0, 1} for one in kept)
