"""A script that ends without waiting for its last save has saved all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.persist import SMALL_BYTES
from resilient.checkpoint.verify import verify
from resilient.storage.local import LocalStore

SCRIPT = """
import sys
import torch
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.engine_factory import open_engine
from resilient.state_dict.snapshot import Part

model = torch.nn.ModuleList(torch.nn.Linear(1024, 4096) for _ in range(5))
checkpointer = open_engine(sys.argv[1])
checkpointer.resume({"model": Part(model)})
checkpointer.save(1, {"model": Part(model)}, CheckpointInfo())
"""


@pytest.mark.smoke
def test_the_save_in_flight_lands_whole_in_several_files(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    store = LocalStore(tmp_path)
    (checkpoint,) = committed(store)
    files = [one for one in store.list(checkpoint.folder) if "model.r00000-" in one.key]
    assert len(files) > 1
    assert sum(one.size_bytes for one in files) > SMALL_BYTES, "else one thread wrote it"
    assert verify(store, checkpoint) == []
