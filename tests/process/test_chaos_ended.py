"""`resilient chaos run` that is asked to end: nothing that it has begun stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

WORKLOAD = str(Path(__file__).with_name("workload.py"))
PATIENCE_SECONDS = 100.0
FULL = """
[[fault]]
kind = "disk_full"
at = 0.9
"""


def started(folder, plan, *options):
    words = ("run", plan, "--seed", "3", "--folder", str(folder / "runs"))
    script = ("train", WORKLOAD, "--output-dir", "{folder}", *options)
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "resilient_cli", "chaos", *words, "--", *script],
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def wait_until(holds, process, folder):
    began = time.monotonic()
    while not holds():
        said = (folder / "said").read_text()
        assert time.monotonic() - began < PATIENCE_SECONDS, said
        assert process.poll() is None, said
        time.sleep(0.02)


def of_folder(folder):
    """Return the processes, zombies not, whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_rehearsal_that_is_asked_to_end_takes_its_training_along(tmp_path, number, code):
    process = started(tmp_path, "kills", "--steps", "100000", "--pause", "0.05")
    steps = tmp_path / "runs" / "calm" / "steps-0.jsonl"
    wait_until(steps.exists, process, tmp_path)
    process.send_signal(number)
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) == code, (tmp_path / "said").read_text()
    assert of_folder(tmp_path / "runs") == []
    assert f"ended by {number.name}" in (tmp_path / "said").read_text()
    assert steps.exists(), "the folders stay"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_rehearsal_that_is_asked_to_end_leaves_no_disk_mounted(tmp_path):
    (tmp_path / "full.toml").write_text(FULL, encoding="utf-8")
    plan = str(tmp_path / "full.toml")
    process = started(tmp_path, plan, "--steps", "24", "--pause", "0.2")
    disk = tmp_path / "runs" / "struck" / "disk"
    wait_until(lambda: disk.is_mount() and any(disk.iterdir()), process, tmp_path)
    process.terminate()
    assert process.wait(PATIENCE_SECONDS) == 143, (tmp_path / "said").read_text()
    assert not disk.exists()
    assert of_folder(tmp_path / "runs") == []
