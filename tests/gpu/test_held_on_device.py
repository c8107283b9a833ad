"""Each step of a training on a GPU held in memory; it is killed, and ends with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.endings import differences, ending

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPT = Path(__file__).with_name("held_trainer.py")
HOLDS = ("--every", "memory=1step")


def train(folder, optimizer, dies_at, *launch):
    folder.mkdir()
    command = [sys.executable, "-m", "resilient_cli", "train", "--nproc-per-node", "1", *launch]
    command += [str(SCRIPT), str(folder), optimizer, "24", str(dies_at)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "not cached in memory" not in said, said
    return said


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_a_killed_training_goes_on_from_the_step_that_memory_held(tmp_path, optimizer):
    train(tmp_path / "unbroken", optimizer, 0)
    said = train(tmp_path / "killed", optimizer, 17, *HOLDS)
    assert "SIGKILL" in said
    resumed = re.findall(r"resumed from checkpoint-(\d+)-g1", said)
    # Step 17 may have been on its way.
    assert [int(one) for one in resumed] in ([16], [17]), said
    assert (
        differences(
            ending(tmp_path / "killed" / "output"), ending(tmp_path / "unbroken" / "output")
        )
        == []
    )


def test_a_calm_training_is_not_changed_by_what_memory_holds(tmp_path):
    train(tmp_path / "alone", "adamw_torch", 0)
    train(tmp_path / "held", "adamw_torch", 0, *HOLDS)
    assert (
        differences(ending(tmp_path / "held" / "output"), ending(tmp_path / "alone" / "output"))
        == []
    )
