from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from tests.process.gangs import finish, gang_of

WORKER = Path(__file__).with_name("ddp_worker.py")


def wait_for_step(process, step):
    for line in process.stdout:
        if line.strip() == f"step {step}":
            return
    raise AssertionError(process.stderr.read())


def last_saved(folder, rank):
    checkpoints, _, _ = torch.load(folder / f"repository-{rank}.pt", weights_only=False)
    return max(checkpoints).step


@pytest.mark.smoke
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_stops_all_with_their_last_step_saved(tmp_path, size, asked):
    with gang_of(size, WORKER, "run", tmp_path, "max_steps=1000000") as gang:
        wait_for_step(gang[-1], 20)
        gang[-1].send_signal(asked)
        began = time.monotonic()
        ends = finish(gang, within_seconds=30)
        assert time.monotonic() - began < 15
        assert [status for status, _, _ in ends] == [75] * size, ends
        stopped = {last_saved(tmp_path, rank) for rank in range(size)}
        assert len(stopped) == 1
        assert f"stopped after step {stopped.pop()}" in ends[0][2]


def test_a_rank_inside_a_collective_hears_a_second_signal(tmp_path):
    """Rank 0 is frozen by SIGSTOP, so rank 1 hangs in a collective and cannot run a handler."""
    with gang_of(2, WORKER, "run", tmp_path, "max_steps=1000000") as gang:
        wait_for_step(gang[1], 20)
        gang[0].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        gang[1].send_signal(signal.SIGTERM)
        time.sleep(0.7)  # longer than one order that arrives twice
        assert gang[1].poll() is None
        gang[1].send_signal(signal.SIGTERM)
        assert gang[1].wait(5) == 128 + signal.SIGTERM
        gang[0].kill()
        assert "exited at once: a second signal came" in finish(gang)[1][2]


def test_the_grace_is_kept(tmp_path):
    with gang_of(2, WORKER, "run", tmp_path, "max_steps=1000000", "grace_seconds=1.0") as gang:
        wait_for_step(gang[1], 20)
        gang[0].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        gang[1].send_signal(signal.SIGTERM)
        assert gang[1].wait(6) == 128 + signal.SIGTERM
        gang[0].kill()
        finish(gang)
