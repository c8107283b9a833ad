"""ckpt import and export: a checkpoint of Transformers, there and back."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.hf_runs import HERE

THEIRS = HERE / "gpt2_all" / "run" / "checkpoint-8"
SLOW = pytest.mark.filterwarnings("ignore")  # of the peers


@SLOW
def test_a_checkpoint_comes_in_and_goes_out_as_it_was(tmp_path, call):
    from resilient.train.hf_interop.checkpoint import TransformersCheckpoint

    repo, out = tmp_path / "run", tmp_path / "checkpoint-8"
    taken = call("ckpt", "import", THEIRS, repo)
    assert taken.status == 0, taken.stderr
    assert taken.stdout == f"{THEIRS} is now checkpoint-8-g1 of file://{repo}.\n"
    assert call("ckpt", "verify", "--all", repo, "--level", "deep").status == 0
    given = call("ckpt", "export", "latest", repo, "--format", "hf", "--out", out)
    assert given.stdout == f"checkpoint-8-g1 of file://{repo} is in {out}.\n"
    before, after = TransformersCheckpoint(THEIRS), TransformersCheckpoint(out)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        there = (out / name).exists()
        assert there, name
    for one in ("weights", "optimizer", "scheduler"):
        assert same(getattr(before, one)(), getattr(after, one)()), one
    assert same(before.random_state(0), after.random_state(0))
    differ = {n for n in before.state if before.state[n] != after.state[n]}
    assert differ <= {"best_model_checkpoint", "stateful_callbacks"}
    again = call("ckpt", "import", THEIRS, repo)
    assert again.status == 78
    assert "already holds checkpoint-8-g1" in again.stderr


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[n], other[n]) for n in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool((one == other).all()) if hasattr(one, "shape") else one == other


def test_what_cannot_be_named_says_what_to_do_instead(tmp_path, call):
    outcome = call("ckpt", "import", HERE / "reg_sgd" / "run" / "checkpoint-7", tmp_path / "run")
    assert outcome.status == 78
    assert "has no config.json to build its model from" in outcome.stderr
    assert "resilient train --resume" in outcome.stderr
    assert call("ckpt", "import", tmp_path, tmp_path / "run").status == 66
    assert not (tmp_path / "run").exists()


@SLOW
def test_import_names_the_weights_that_it_ignores(tmp_path, call):
    folder = shutil.copytree(THEIRS, tmp_path / "checkpoint-8")
    weights = load_file(folder / "model.safetensors") | {"transformer.extra": torch.ones(3)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    taken = call("ckpt", "import", folder, tmp_path / "run", "--json")
    assert taken.status == 0, taken.stderr
    odd = "this model does not have its weights `transformer.extra`"
    assert json.loads(taken.stdout)["odd"] == odd


@SLOW
@pytest.mark.parametrize("asks", ["option", "environment"])
def test_import_of_a_lossy_folder_strict_writes_nothing(tmp_path, call, monkeypatch, asks):
    folder = tmp_path / "run" / "checkpoint-8"
    shutil.copytree(THEIRS, folder)
    (folder / "scheduler.pt").unlink()
    repo = tmp_path / "repo"
    more = ["--strict-resume"] if asks == "option" else []
    if asks == "environment":
        monkeypatch.setenv("RESILIENT_STRICT_RESUME", "yes")
    refused = call("ckpt", "import", folder, repo, *more)
    assert refused.status == 65, refused.stderr
    assert "strict_resume refuses a loss. Nothing was committed" in refused.stderr
    assert not repo.exists()


@SLOW
def test_import_of_a_lossy_folder_names_the_loss(tmp_path, call):
    folder = tmp_path / "run" / "checkpoint-8"
    shutil.copytree(THEIRS, folder)
    (folder / "rng_state.pth").unlink()
    taken = call("ckpt", "import", folder, tmp_path / "repo")
    assert taken.status == 0, taken.stderr
    assert "Lost: " in taken.stdout


def test_nothing_to_export_is_missing_input(tmp_path, call):
    outcome = call("ckpt", "export", "latest", tmp_path / "run", "--out", tmp_path / "out")
    assert outcome.status == 66
    assert not (tmp_path / "out").exists()


@SLOW
def test_as_json_they_say_the_same(tmp_path, call):
    repo, out = tmp_path / "run", tmp_path / "out"
    said = json.loads(call("ckpt", "import", THEIRS, repo, "--json").stdout)
    assert (said["type"], said["id"]) == ("import", "checkpoint-8-g1")
    said = json.loads(call("ckpt", "export", "latest", repo, "--out", out, "--json").stdout)
    assert (said["type"], said["folder"]) == ("export", str(out))
