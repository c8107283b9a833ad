"""Real training of adapters beside frozen layers, killed and resumed through references."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.format.keys import CheckpointId
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store
from tests.helpers.keepers import names, open_one
from tests.process import frozen_worker

from tests.helpers.manifests import Values, frozen_parts_of  # isort: skip


def test_a_killed_run_of_adapters_ends_with_the_bits_of_an_unbroken_one(tmp_path):
    script = Path(frozen_worker.__file__)
    died = subprocess.run([sys.executable, script, tmp_path / "killed", "7"], check=False)
    assert died.returncode == -signal.SIGKILL
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    resumed = frozen_worker.train(tmp_path / "killed")
    unbroken = frozen_worker.train(tmp_path / "unbroken")
    torch.set_num_threads(threads)
    expected = unbroken.model.state_dict()
    for name, one in resumed.model.state_dict().items():
        assert torch.equal(one, expected[name]), name
    assert resumed.state.log_history == unbroken.state.log_history
    store = open_store(str(tmp_path / "killed"))
    newest = committed(store)[0]
    manifest = read_manifest(store, newest)
    assert newest == CheckpointId(2, frozen_worker.STEPS)
    (entry,) = [one for one in manifest.tensors if one.name == "model/base.weight"]
    assert [one.file for one in entry.regions] == ["checkpoint-2-g1/model.r00000.safetensors"]
    assert CheckpointId(1, 2) not in committed(store)
    assert verify(store, newest, "deep") == []


def test_a_run_that_wants_copies_gets_them(tmp_path):
    frozen_worker.train(tmp_path / "copies", save_unchanged="write")
    store = open_store(str(tmp_path / "copies"))
    for one in committed(store):
        manifest = read_manifest(store, one)
        assert manifest.own_bytes == manifest.size_bytes > 128 * 128 * 4


def test_a_keeper_lands_saves_that_refer_and_what_memory_lacks_is_read(start, tmp_path):
    keeper, url = start(), tmp_path / "run"
    checkpointer = open_one(keeper, url)
    checkpointer.resume({})
    for step in (1, 2):
        checkpointer.save(step, {"model": frozen_parts_of(step)["model"]}, CheckpointInfo())
    checkpointer.close()
    store = open_store(str(url))
    assert read_manifest(store, CheckpointId(1, 2)).own_bytes < 5000
    held = Values()
    second = open_one(keeper, url, scope="next")
    assert second.resume({"model": Part(held)}).checkpoint == CheckpointId(1, 2)
    for name, one in frozen_parts_of(2)["model"].stateful.state.items():
        assert torch.equal(held.state[name], one), name
    assert "MemoryCopyRejected" not in names(second.seen)
    second.save(3, {"model": frozen_parts_of(3)["model"]}, CheckpointInfo())
    second.close()
    assert verify(store, CheckpointId(2, 3), "deep") == []
