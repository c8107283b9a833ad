"""FSDP2 under `resilient train`: sharded for real, and the bits of an unbroken run after faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.helpers.restoring import restored_step
from tests.process.gangs import run_gang_to_end
from tests.process.jobs import Job, run

FSDP = ("--parallelism", "fsdp")
WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    code, said = run(folder, *FSDP)
    assert code == 0, said
    return folder


def test_the_ranks_write_their_own_rows(unbroken):
    store = open_store(str(unbroken))
    manifest = read_manifest(store, committed(store)[0])
    assert manifest.world == {"size": 2, "strategy": "fsdp"}
    tensors = {one.name: one for one in manifest.tensors}
    for name in ("model/embed.weight", "optimizer/state/embed.weight/exp_avg"):
        places = [(one.file.split(".")[1], one.region) for one in tensors[name].regions]
        assert [(file, region.offsets[0], region.lengths) for file, region in places] == [
            ("r00000", 0, (128, 16)),
            ("r00001", 128, (128, 16)),
        ]


@pytest.mark.smoke
def test_a_run_that_was_killed_and_stopped_equals_an_unbroken_one(tmp_path, unbroken):
    with Job(tmp_path, *FSDP, "--pause", "0.08") as job:
        os.kill(job.wait_for_step(6, rank=1), signal.SIGKILL)
        job.wait_for_step(14)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.said()
        assert "resumed from checkpoint-4-g1" in job.said()
    code, said = run(tmp_path, *FSDP)
    assert code == 0, said
    assert differences(ending(tmp_path), ending(unbroken)) == []


def test_a_run_goes_on_with_replicas_and_back_with_shards(tmp_path):
    for steps, parallelism in ((4, "fsdp"), (8, "ddp"), (12, "fsdp")):
        code, said = run(tmp_path, "--steps", str(steps), "--parallelism", parallelism)
        assert code == 0, said
        assert steps == 4 or f"resumed from checkpoint-{steps - 4}-g" in said
    assert restored_step(tmp_path)[0] == 12


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_gradients_and_moments_are_sharded_and_the_result_is_that_of_ddp(tmp_path, size):
    run_gang_to_end(size, WORKER, tmp_path)
    results = [torch.load(tmp_path / f"result-{rank}.pt") for rank in range(size)]
    for one in results:
        assert one["plain_parameters"] == []
        assert one["plain_moments"] == []
        # Uneven rows: nobody holds more than a share of each tensor rounded up.
        assert one["held"] <= one["total"] / size + one["row_bytes"]
        assert one["norm"] == results[0]["norm"]
        assert torch.equal(one["running_mean"], results[0]["running_mean"])
        assert one["means"] == results[0]["means"]
    assert sum(one["held"] for one in results) == results[0]["total"]
    assert results[0]["evaluations"] == pytest.approx(results[0]["evaluations_by_ddp"], abs=1e-4)
    assert all(one["evaluations"] == results[0]["evaluations"] for one in results)
    for name, whole in results[0]["by_ddp"].items():
        assert torch.allclose(results[0]["by_fsdp"][name], whole, atol=1e-5), name
        assert torch.equal(results[0]["exported"][name], results[0]["by_fsdp"][name])
