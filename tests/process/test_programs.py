"""`resilient train --no-python`: a program that is no Python is a worker like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

TRAIN = (sys.executable, "-m", "resilient_cli", "train", "--no-python", "--grace", "5")
# Fails in its first life, and says who it is in each.
WORKER = """#!/bin/sh
echo "$$ $RANK $WORLD_SIZE $RESILIENT_CAUSE $1" >> said.$RANK
[ "$RESILIENT_CAUSE" = start ] && [ "$1" = fail ] && exit 7
[ "$1" = wait ] && { touch ready; exec sleep 600; }
exit 0
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "worker.sh"
    path.write_text(WORKER, encoding="utf-8")
    path.chmod(0o755)
    return path


def run(program, *arguments, **more):
    words = (*TRAIN, *map(str, arguments))
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, cwd=program.parent, env=environ, stderr=subprocess.PIPE, text=True, **more
    )


def test_it_is_started_with_the_variables_of_a_worker_and_again_when_it_fails(program):
    with run(program, "--nproc-per-node", 2, "./worker.sh", "fail") as process:
        _, told = process.communicate(timeout=120)
    assert process.returncode == 0, told
    ranks = [(program.parent / f"said.{rank}").read_text().splitlines() for rank in (0, 1)]
    lives = [[line.split()[1:] for line in one] for one in ranks]
    # One that failed first may have ended the other before it said a word.
    assert any(["start", "fail"] == line[2:] for one in lives for line in one)
    assert [one[-1] for one in lives] == [
        ["0", "2", "failure", "fail"],
        ["1", "2", "failure", "fail"],
    ]


def test_it_dies_with_the_agent(program):
    with run(program, "./worker.sh", "wait") as process:
        while not (program.parent / "ready").exists():
            assert process.poll() is None
            time.sleep(0.05)
        worker = int((program.parent / "said.0").read_text().split()[0])
        process.kill()
        process.wait(60)
        for _ in range(200):
            try:
                os.kill(worker, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            os.kill(worker, signal.SIGKILL)
            pytest.fail("it outlived the agent")
        process.stderr.read()


def test_what_may_not_be_run_is_told(program):
    program.chmod(0o644)
    with run(program, "--max-restarts", 0, "./worker.sh") as process:
        _, told = process.communicate(timeout=120)
    assert (process.returncode, "no program `./worker.sh`" in told) == (66, True)


def test_it_is_not_asked_for_stacks_which_would_end_it(program):
    program.write_text('#!/bin/sh\nls "$RESILIENT_NOTES" > notes\n', encoding="utf-8")
    with run(program, "--nproc-per-node", 1, "./worker.sh") as process:
        assert process.wait(60) == 0, process.stderr.read()
    assert "stacks-" not in (program.parent / "notes").read_text(encoding="utf-8")
