"""``ckpt export`` to files that other tools read: the numbers are those of the checkpoint."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.cli_repositories import flip_bit
from tests.helpers.drifting_runs import write_drifting_run
from tests.helpers.foreign_folders import write_slices
from tests.helpers.sharded_folders import optimizer, values

FORMATS = ("safetensors", "torch", "dcp")


@pytest.fixture
def repo(tmp_path):
    write_drifting_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("kind", FORMATS)
def test_ours_is_the_same_to_diff_whatever_it_is_written_as(kind, repo, tmp_path, call):
    out = tmp_path / "out"
    outcome = call("ckpt", "export", "latest", repo, "--format", kind, "--out", out)
    assert outcome.status == 0, outcome.stderr
    assert outcome.stdout == f"checkpoint-20-g1 of file://{repo} is in {out}.\n"
    path = {"safetensors": out / "model.safetensors", "torch": out / "checkpoint.pt", "dcp": out}
    found = call("ckpt", "diff", repo / "checkpoint-20-g1", path[kind], "--json")
    said = json.loads(found.stdout)
    equal = [one["equal"] for one in said["tensors"] if one["part"] == "model"]
    assert equal == [True] * 3
    assert said["only_after"] == []
    moments = [one["equal"] for one in said["tensors"] if one["part"] == "optimizer"]
    assert moments == ([] if kind == "safetensors" else [True] * 9)


def test_pieces_of_ranks_are_whole_in_the_file(tmp_path, call):
    theirs, out = tmp_path / "theirs", tmp_path / "out"
    theirs.mkdir()
    write_slices({"model": values(0), "optimizer": optimizer(), "step": 7}, theirs)
    outcome = call("ckpt", "export", theirs, "--format", "safetensors", "--out", out, "--json")
    assert outcome.status == 0, outcome.stderr
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == values(0).keys()
    assert all(torch.equal(weights[name], one) for name, one in values(0).items())
    assert (out / "optimizer.safetensors").exists()


def test_torch_reads_it_as_plain_data(repo, tmp_path, call):
    out = tmp_path / "out"
    call("ckpt", "export", "step:10", repo, "--format", "torch", "--out", out)
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert state["step"] == 10
    assert {one.shape for one in state["model"].values()} == {(3, 4), (3,), (2, 3)}
    assert [one.name for one in out.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_damaged_one_is_not_written(kind, repo, tmp_path, call):
    flip_bit(repo / "checkpoint-20-g1" / "model.r00000.safetensors")
    out = tmp_path / "out"
    outcome = call("ckpt", "export", "latest", repo, "--format", kind, "--out", out)
    assert outcome.status == 1
    assert "resilient ckpt repair checkpoint-20-g1" in outcome.stderr
    assert not out.exists()


def test_what_is_there_is_not_written_over(repo, tmp_path, call):
    outcome = call("ckpt", "export", "latest", repo, "--format", "safetensors", "--out", tmp_path)
    assert (outcome.status, "exists already" in outcome.stderr) == (78, True)


def test_a_folder_without_tensors_leaves_nothing(tmp_path, call):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("nothing")
    out = tmp_path / "out"
    outcome = call("ckpt", "export", tmp_path / "theirs", "--format", "dcp", "--out", out)
    assert outcome.status == 65
    assert not out.exists()
