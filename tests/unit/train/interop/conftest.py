"""Checkpoints of Transformers to spoil."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from hf_runs import HERE


@pytest.fixture
def theirs(tmp_path):
    """Return a copy of step 7 of a small recorded run."""
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(HERE / "reg_sgd" / "run" / "checkpoint-7", folder)
    return folder
