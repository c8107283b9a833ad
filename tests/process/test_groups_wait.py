"""``ddp_timeout`` holds for the groups of some of the ranks too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.gangs import ROOT

WORKER = Path(__file__).with_name("groups_worker.py")


@pytest.fixture(scope="module")
def waits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli")])
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), "77"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(one.read_text()) for one in sorted(folder.glob("waits-*.json"))]


@pytest.mark.parametrize("kind", ["pipeline", "pipeline_mesh", "tensor_parallel", "hybrid_shard"])
def test_groups_of_some_ranks_wait_as_long_as_that_of_all(waits, kind):
    assert len(waits) == 4
    for one in waits:
        assert one[kind]
        assert set(one[kind]) == {77.0}, one
