"""Signals between a training under plain python and the processes it makes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import committed
from resilient.storage.open import open_store

SCRIPT = Path(__file__).with_name("forking.py")


@contextmanager
def training(folder, callback, steps, loaders=0):
    """Start it as the leader of a process group, as a shell does; nothing of it is left."""
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), callback, str(steps), str(loaders)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("callback", ["pool", "terminate", "early"])
def test_ending_a_child_does_not_stop_the_training(tmp_path, callback):
    with training(tmp_path, callback, 4) as process:
        said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert said.count(f"child {-signal.SIGTERM}") == (0 if callback == "pool" else 4), said


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_saves_although_loaders_hear_it(tmp_path, asked):
    with training(tmp_path, "announce", 100_000, loaders=2) as process:
        for line in process.stdout:
            if line.strip() == "step 5":
                break
        os.killpg(process.pid, asked)
        said, _ = process.communicate(timeout=60)
    last = committed(open_store(str(tmp_path)))[0].step
    assert f"training stopped after step {last}: {asked.name}" in said
    assert "exited at once" not in said
    assert process.returncode == 75, said
    assert "hint: start it again" in said
    assert "Traceback" not in said


def test_uncaught_error_of_ours_shows_its_hint_under_plain_python():
    program = "from resilient.errors import StoreFull\nraise StoreFull('full', hint='df -h')"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("StoreFull: full\nhint: df -h\n")


def test_other_errors_end_plain_python_as_ever_and_ours_with_their_code(tmp_path):
    program = "from resilient.train.session import end_with_exit_codes as end\nend()\nend()\n"
    raised = {
        "raise ValueError('x')": (1, "ValueError: x\n"),
        "from resilient.errors import StoreFull\nraise StoreFull('full', hint='df -h')": (
            73,
            "full  [RES-STORE-507]\n  hint: df -h\n",
        ),
    }
    for line, (code, last) in raised.items():
        ended = subprocess.run(
            [sys.executable, "-c", program + line], capture_output=True, text=True, check=False
        )
        assert ended.returncode == code
        assert ended.stderr.endswith(last)
        assert ended.stderr.count("hint: ") == last.count("hint: ")
        assert ended.stderr.count("Traceback") == 1


def test_trainer_under_python_wrong_variable_ends_with_78(tmp_path):
    program = (
        "import torch, resilient\n"
        "arguments = resilient.TrainingArguments('out', use_cpu=True)\n"
        "resilient.Trainer(torch.nn.Linear(1, 1), arguments)\n"
    )
    environ = {**os.environ, "RESILIENT_REQUIRE_SIGNATURE": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environ,
    )
    assert ended.returncode == 78
    assert "RESILIENT_REQUIRE_SIGNATURE='2' is not accepted" in ended.stderr
