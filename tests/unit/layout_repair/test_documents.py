"""What all steps of a run say alike, taken from the step beside it that is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from resilient.layout_repair.plan import plan_layout_repair
from tests.helpers.foreign_folders import train_further

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"


@pytest.fixture
def run(tmp_path):
    for step in (4, 8):
        shutil.copytree(GOLDEN, tmp_path / f"checkpoint-{step}")
    train_further(tmp_path / "checkpoint-4")
    return tmp_path


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_configuration_of_another_model_is_that_of_another_step_again(run):
    change(run / "checkpoint-8" / "config.json", n_embd=64)
    plan = plan_layout_repair(str(run / "checkpoint-8"))
    assert [one.file for one in plan.steps] == ["config.json"]
    assert plan.is_whole
    assert json.loads(plan.draft.read("config.json", 0, 1 << 20))["n_embd"] == 32


def test_one_that_is_as_wrong_in_the_other_step_is_not_taken(run):
    for step in (4, 8):
        change(run / f"checkpoint-{step}" / "config.json", n_embd=64)
    plan = plan_layout_repair(str(run / "checkpoint-8"))
    assert "config.json" not in plan.draft.list().sizes
    assert "the model's configuration" in plan.losses
    assert len(plan.steps) == 1, "what is left out was not put there first"


def test_a_weight_under_another_name_is_not_called_mended(run):
    shutil.rmtree(run / "checkpoint-4")
    path = run / "checkpoint-8" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"h.0.ln_1.weight", b"h.0.ln_9.weight", 1))
    plan = plan_layout_repair(str(run / "checkpoint-8"))
    assert not plan.is_whole
    assert "--from" in plan.refused["model.safetensors"]


@pytest.mark.parametrize("name", ["config.json", "trainer_state.json"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_document_with_a_mark_before_it_is_read_and_written_without(run, name, encoding):
    shutil.rmtree(run / "checkpoint-4")
    path = run / "checkpoint-8" / name
    before = path.read_text()
    path.write_text(before, encoding=encoding)
    plan = plan_layout_repair(str(run / "checkpoint-8"))
    assert plan.is_whole
    assert plan.draft.read(name, 0, 1 << 20) == before.encode()


def shard_weights(path, lost="", misspelled=""):
    """Split the weights into two shards with an index, and lose a tensor after that."""
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    mapped = {name: file for file, those in shards.items() for name in those}
    if misspelled:
        mapped[f"{misspelled}x"] = mapped.pop(misspelled)
    index = {"metadata": {"total_size": 116352}, "weight_map": mapped}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "model.safetensors").unlink()
    for file, those in shards.items():
        held = {name: weights[name] for name in those if name != lost}
        save_file(held, path / file, {"format": "pt"})
    return path


def test_index_that_names_a_lost_tensor_is_kept(run):
    name = "transformer.h.1.attn.c_attn.bias"
    plan = plan_layout_repair(str(shard_weights(run / "checkpoint-8", lost=name)))
    assert not plan.is_repaired
    assert name in plan.refused["model.safetensors.index.json"]


def test_index_that_misspells_a_tensor_is_written_again(run):
    name = "transformer.h.1.attn.c_attn.bias"
    plan = plan_layout_repair(str(shard_weights(run / "checkpoint-8", misspelled=name)))
    assert plan.is_whole
    text = plan.draft.read("model.safetensors.index.json", 0, 1 << 20)
    assert name in json.loads(text)["weight_map"]


def test_valid_header_of_a_transposed_weight_is_not_replaced(run):
    """The header of another step would give the same bytes another order."""
    path, name = run / "checkpoint-8", "transformer.h.0.mlp.c_fc.weight"
    weights = load_file(path / "model.safetensors")
    weights[name] = weights[name].T.contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    plan = plan_layout_repair(str(path))
    assert "model.safetensors" not in {step.file for step in plan.steps}
    assert not plan.is_whole
