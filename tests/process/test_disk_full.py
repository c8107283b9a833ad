"""The disk fills up during training: older checkpoints stay, and what follows is configured."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.verify import verify
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.jobs import PATIENCE_SECONDS, Job, run

DISK_BYTES = 1400 << 10  # two checkpoints of the workload and a half


def intact(repo) -> list[int]:
    store = open_store(str(repo))
    there = committed(store)
    assert all(verify(store, one) == [] for one in there)
    return [one.step for one in there]


def stuff(folder):
    """Fill a file system to its last byte."""
    path = folder / "stuffing"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return path


@pytest.mark.smoke
def test_stop_ends_with_73_and_the_message_says_what_to_do(tmp_path, small_disk):
    repo = small_disk(DISK_BYTES)
    code, said = run(tmp_path / "out", launch=("--repo", str(repo)))
    assert code == 73, said
    assert intact(repo) == [8, 4]
    assert "checkpoint-12-g1 was not saved" in said
    assert "older checkpoints are intact" in said
    assert "not enough space" in said, "told before the first byte, with the numbers"
    assert "bytes with a margin" in said
    assert "garbage collection could free 0" in said
    assert "df -h" in said or "free" in said
    leftovers = [path.name for path in repo.rglob("*") if "checkpoint-12" in str(path)]
    assert leftovers == [], "a failed save gives its space back"


def test_continue_goes_on_and_saves_again_once_there_is_space(tmp_path, small_disk):
    repo = small_disk(3 << 20)
    ballast = repo / "ballast"
    ballast.write_bytes(b"x" * ((3 << 20) - DISK_BYTES))
    options = ("--on-save-failure", "continue", "--pause", "0.1")
    with Job(tmp_path / "out", *options, launch=("--repo", str(repo))) as job:
        began = time.monotonic()
        while "checkpoint-12-g1 was not saved" not in job.said():
            assert time.monotonic() - began < PATIENCE_SECONDS
            time.sleep(0.02)
        ballast.unlink()
        assert job.wait() == 0, job.said()
    assert intact(repo)[0] == 24
    code, said = run(tmp_path / "calm")
    assert code == 0, said
    assert differences(ending(repo), ending(tmp_path / "calm")) == []


def test_continue_outlives_event_files_on_the_full_disk(tmp_path, small_disk):
    disk = small_disk(3 << 20)
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * ((3 << 20) - DISK_BYTES))
    folder = tmp_path / "out"
    options = ("--output-dir", str(disk), "--diary", str(folder), "--pause", "0.3")
    with Job(folder, *options, "--on-save-failure", "continue") as job:
        began = time.monotonic()
        while "checkpoint-12-g1 was not saved" not in job.said():
            assert time.monotonic() - began < PATIENCE_SECONDS
            time.sleep(0.02)
        # A page that a file has already would take more lines, and a failed save gives space back.
        while "lines are dropped" not in job.said() and job.process.poll() is None:
            for path in [disk / "log.jsonl", *disk.glob("events/*")]:
                path.unlink(missing_ok=True)
            stuffing = stuff(disk)
            time.sleep(0.1)
        ballast.unlink()
        stuffing.unlink()
        assert job.wait() == 0, job.said()
        said = job.said()
    assert intact(disk)[0] == 24
    assert "its lines are dropped: No space left" in said
    assert "is written again; lines dropped: " in said
    for path in [disk / "log.jsonl", *(disk / "events").iterdir()]:
        assert all(json.loads(line) for line in path.read_text().splitlines())
