"""DeepSpeed in the Trainer: partitioned for real, and the bits of an unbroken run after SIGKILL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.storage.open import open_store
from tests.helpers.endings import differences, ending
from tests.process.deepspeed_forks import run_forks
from tests.process.deepspeed_worker import KINDS, RUNS, STEPS, WORLDS, ZERO

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
WORKER = Path(__file__).with_name("deepspeed_worker.py")
pytestmark = [
    pytest.mark.timeout(600),
    # All tests read what one process and its forks left.
    pytest.mark.xdist_group("deepspeed"),
]
FULL = [kind for kind in ZERO if not KINDS[kind].get("bf16")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_forks(WORKER, folder, len(WORLDS))
    return folder


def said(folder, rank=0):
    return json.loads((folder / f"held-{rank}").read_text())


def newest(folder):
    store = open_store(str(folder))
    return read_manifest(store, committed(store)[0])


@pytest.mark.parametrize("kind", ZERO)
def test_a_run_that_was_killed_equals_an_unbroken_one(runs, kind):
    killed = runs / f"{kind}-killed"
    assert newest(killed).world == {"size": 2, "strategy": f"zero-{kind[4]}"}
    assert newest(killed).checkpoint.generation == 2, "it did die"
    assert differences(ending(killed), ending(runs / f"{kind}-unbroken")) == []


@pytest.mark.parametrize("kind", ZERO)
def test_the_optimizer_is_partitioned_for_real(runs, kind):
    found = [said(runs / f"{kind}-unbroken", rank) for rank in range(2)]
    shares = {one["held"] / one["total"] for one in found}
    assert shares == ({1.0} if kind == "zero0" else {0.5})


@pytest.mark.parametrize("kind", FULL)
def test_weights_and_norms_are_those_of_replicas(runs, kind):
    ours, replicas = runs / f"{kind}-unbroken", runs / "ddp-unbroken"
    assert said(ours)["norms"] == pytest.approx(said(replicas)["norms"], rel=1e-4)
    expected = load_file(replicas / "exported" / "model.safetensors")
    found = load_file(ours / "exported" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        assert torch.allclose(found[name], whole, atol=1e-4), name


@pytest.mark.parametrize("kind", ["zero0", "zero3off"])
def test_half_precision_trains_near_full_precision(runs, kind):
    assert said(runs / f"{kind}-unbroken")["norms"] == pytest.approx(
        said(runs / "ddp-unbroken")["norms"], rel=0.02
    )
    exported = load_file(runs / f"{kind}-unbroken" / "exported" / "model.safetensors")
    assert {one.dtype for one in exported.values()} == {torch.bfloat16}
    # What is saved for going on is not rounded.
    dtypes = {one.dtype for one in newest(runs / f"{kind}-unbroken").tensors}
    assert "F32" in dtypes
    assert "BF16" not in dtypes


def test_a_run_goes_on_in_other_stages_by_other_numbers_and_as_replicas(runs):
    store = open_store(str(runs / "elastic"))
    lives = {one.generation: read_manifest(store, one).world for one in committed(store)}
    assert lives == {
        number: {"size": size, "strategy": kind[:3] if kind == "ddp" else f"zero-{kind[4]}"}
        for number, (kind, size, _) in enumerate(RUNS["elastic"], 1)
    }
    assert committed(store)[0].step == STEPS
    norms = said(runs / "elastic")["norms"]
    assert len(norms) == STEPS
    # Fewer ranks draw noisier gradients.
    assert max(norms) < 2 * said(runs / "ddp-unbroken")["norms"][-1]
