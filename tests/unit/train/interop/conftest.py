"""Checkpoints of Transformers to spoil."""

import shutil

import pytest

from tests.helpers.hf_runs import HERE


@pytest.fixture
def theirs(tmp_path):
    """Return a copy of step 7 of a small recorded run."""
    folder = tmp_path / "checkpoint-7"
    shutil.copytree(HERE / "reg_sgd" / "run" / "checkpoint-7", folder)
    return folder
