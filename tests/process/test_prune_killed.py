"""`ckpt prune` and `ckpt tag` killed for real, at any moment, on a real disk."""

from __future__ import annotations

import subprocess
import sys
import time
from random import Random

import pytest

from resilient.checkpoint.catalog import committed, lineage
from resilient.checkpoint.refs import read_tags
from resilient.checkpoint.verify import verify
from resilient.storage.local import LocalStore
from tests.helpers.cli_repositories import write_run

CYCLES = 12
STEPS = list(range(10, 310, 10))

# Says when it is about to work, so that the kill falls into the work and not into the start.
WORKER = """
import sys
from resilient.clock import SystemClock
from resilient.storage.local import LocalStore
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.retention import Retention
from resilient.checkpoint.garbage_collection import apply_plan, scan_and_plan
from resilient.checkpoint.refs import create_tag
from pathlib import Path

store = LocalStore(Path(sys.argv[1]))
print("ready", flush=True)
create_tag(store, "release", resolve(store, "step:20"), SystemClock())
apply_plan(store, scan_and_plan(store, Retention(keep_last=2), in_full=True), 1)
"""


def strike(repo, after_seconds) -> bool:
    """Start a worker, kill it; return whether it was at work."""
    command = [sys.executable, "-c", WORKER, str(repo)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(after_seconds)
        process.kill()
        return process.wait(60) != 0


@pytest.mark.smoke
def test_a_kill_leaves_what_is_whole_and_the_next_run_ends_the_work(tmp_path):
    draw, struck = Random(7), 0
    for cycle in range(CYCLES):
        repo = tmp_path / str(cycle)
        write_run(repo, [(None, STEPS)])
        struck += strike(repo, draw.uniform(0.0, 0.06))
        store = LocalStore(repo)
        there = committed(store)
        assert [one.step for one in there[:2]] == [300, 290]
        assert all(verify(store, one) == [] for one in there)
        assert lineage(store).candidates[0].step == 300
        assert {one.checkpoint for one in read_tags(store)} <= set(there)
        command = [sys.executable, "-c", WORKER, str(repo)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert [one.step for one in committed(store)] == [300, 290, 20]
        # A kill between a folder's last file and the folder may leave it empty: not an object.
        left = {entry.key.partition("/")[0] for entry in store.list("checkpoint-")}
        assert len(left) == 3, "and the leftovers are swept"
    assert struck, "no kill fell into the work: the test proves nothing here"
