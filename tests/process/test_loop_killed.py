"""The checkpointer of a loop of one's own, with real ranks, launchers and kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from gangs import ROOT, run_gang_to_end

WORKER = Path(__file__).with_name("loop_worker.py")
EXAMPLE = ROOT / "examples" / "plain_loop.py"
STEPS = 240
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("loop")]

ALONE = ()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OURS = ("-m", "resilient_cli", "train", "--nproc-per-node", "2")


def test_every_layout_goes_on_to_the_bit(tmp_path):
    ends = run_gang_to_end(2, WORKER, tmp_path)
    for _, said, _ in ends:
        found = [json.loads(line) for line in said.splitlines()]
        assert [wrong for _, _, wrong in found] == [[]] * 5
        strategies = {layout: world for layout, world, _ in found}
        assert strategies["ddp"] == {"size": 2, "strategy": "ddp"}
        assert strategies["fsdp"] == strategies["flat"] == {"size": 2, "strategy": "fsdp"}


@contextmanager
def started(launcher, folder):
    """Start the example; whatever is left of it is gone at the end."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    process = subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLE), str(folder), str(STEPS)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_all(process)
        process.communicate()


def ranks_of(process):
    found = psutil.Process(process.pid).children(recursive=True)
    return [one for one in found if str(EXAMPLE) in one.cmdline()]


def kill_all(process):
    if alive(process):
        ranks = ranks_of(process)
        process.kill()
        for one in ranks:
            one.kill()


def alive(process):
    return process.poll() is None


def finish(process):
    """Return what the ranks say of their weights at the end."""
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return {line.partition("weights ")[2] for line in said.splitlines() if "weights " in line}, said


def wait_for_checkpoint(process, folder, step=60):
    for _ in range(20_000):
        if list(folder.glob(f"checkpoint-{step}-g*/manifest.json")):
            return
        assert alive(process), process.communicate()[0]
        time.sleep(0.005)
    raise AssertionError(f"checkpoint-{step} did not come")


def uninterrupted(launcher, folder):
    with started(launcher, folder) as process:
        return finish(process)[0]


def killed_and_started_again(launcher, folder):
    with started(launcher, folder) as process:
        wait_for_checkpoint(process, folder)
        kill_all(process)
    with started(launcher, folder) as process:
        weights, said = finish(process)
    assert "resumed from checkpoint-" in said
    return weights


def test_a_killed_process_goes_on_when_it_is_started_again(tmp_path):
    weights = killed_and_started_again(ALONE, tmp_path / "killed")
    assert len(weights) == 1
    assert weights == uninterrupted(ALONE, tmp_path / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What two ranks end with that nobody disturbed."""
    return uninterrupted(TORCHRUN, tmp_path_factory.mktemp("whole"))


def test_a_killed_job_of_torchrun_goes_on_when_it_is_started_again(tmp_path, whole):
    assert killed_and_started_again(TORCHRUN, tmp_path) == whole


def test_a_killed_rank_is_started_again_by_our_launcher(tmp_path, whole):
    with started(OURS, tmp_path) as process:
        wait_for_checkpoint(process, tmp_path)
        ranks = ranks_of(process)
        assert len(ranks) == 2
        ranks[1].kill()
        weights, said = finish(process)
    assert "resumed from checkpoint-" in said
    assert weights == whole
