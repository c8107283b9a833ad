"""Checkpoints of Transformers to spoil."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from hf_runs import HERE


@pytest.fixture
def theirs(tmp_path):
    """Return a copy of step 7 of a small recorded run, with a file that nobody may open."""
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(HERE / "reg_sgd" / "run" / "checkpoint-7", folder)
    (folder / "training_args.bin").write_bytes(b"cos\nsystem\n(S'exit 9'\ntR.")
    return folder
