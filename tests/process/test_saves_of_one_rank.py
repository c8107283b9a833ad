"""A rank that saves alone hears within seconds that all ranks call save()."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("missed_saves_worker.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
AGENT = ("-m", "resilient_cli", "train", "--nproc-per-node", "2", "--max-restarts", "0")
SECONDS_MAX = 60
pytestmark = [pytest.mark.xdist_group("missed-saves")]


@pytest.mark.parametrize(
    ("launcher", "mode", "reason"),
    [
        (TORCHRUN, "closes", "rank 1: it closed its checkpointer and did not call save()"),
        pytest.param(TORCHRUN, "trains", "rank 1: it is in a", marks=pytest.mark.smoke),
        (TORCHRUN, "barrier", "rank 1: it is in torch.distributed.barrier"),
        (TORCHRUN, "last", "rank 0: it is in a"),
        (AGENT, "trains", "rank 1: it is in a"),
    ],
    ids=["closes", "trains", "barrier", "last", "agent"],
)
def test_save_on_one_rank_fails_in_seconds(request, tmp_path, launcher, mode, reason):
    if request.node.callspec.id not in ("trains", "agent") and not request.config.option.matrix:
        pytest.skip("--matrix runs all modes")
    run = subprocess.run(
        [sys.executable, *launcher, str(WORKER), str(tmp_path / "run"), mode],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
    )
    assert run.returncode != 0
    told = re.findall(r"FAILED (\d+) (.*)", run.stdout + run.stderr)
    assert told, run.stdout + run.stderr
    seconds, message = told[0]
    assert int(seconds) < SECONDS_MAX
    assert reason in message
    assert "all ranks call save()" in message
    assert "remove `if rank == 0`" in message
