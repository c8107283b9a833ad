"""Weights of which only some have the name prefix of a wrapper."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.diff.verification import verify_folder
from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from resilient.layouts.consistency import unwrapped_names

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAME = "transformer.h.0.attn.c_attn.weight"


@pytest.fixture
def path(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / "run" / "checkpoint-8"))


def rename(path, change, file=WEIGHTS):
    held = load_file(path / file)
    save_file({change(name): value for name, value in held.items()}, path / file, {"format": "pt"})
    return held


def one(prefix):
    return lambda name: prefix + name if name == NAME else name


def all_but_one(prefix):
    return lambda name: name if name == NAME else prefix + name


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("change", [one, all_but_one])
def test_mix_of_names_is_refused_and_repaired(path, prefix, change):
    whole = rename(path, change(prefix))
    verdict = verify_folder(str(path)).verdict
    assert verdict.answer == "no"
    assert "prefix of a wrapper" in verdict.why[0]
    plan = plan_layout_repair(str(path))
    assert plan.is_whole
    assert plan.verdict.answer == "yes"
    made = write_repaired(plan, place_of(plan))
    found = load_file(made / WEIGHTS)
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_names_in_shards_and_index_are_repaired(path):
    whole = load_file(path / WEIGHTS)
    names = sorted(whole)
    shards = {
        f"model-0000{number + 1}-of-00002.safetensors": names[number::2] for number in range(2)
    }
    mapped = {}
    for file, held_names in shards.items():
        save_file({name: whole[name] for name in held_names}, path / file, {"format": "pt"})
        mapped |= {one("_orig_mod.")(name): file for name in held_names}
        rename(path, one("_orig_mod."), file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": mapped}))
    (path / WEIGHTS).unlink()
    assert verify_folder(str(path)).verdict.answer == "no"
    plan = plan_layout_repair(str(path))
    assert plan.is_whole
    made = write_repaired(plan, place_of(plan))
    assert sorted(json.loads((made / INDEX).read_text())["weight_map"]) == names
    found = {name: value for file in shards for name, value in load_file(made / file).items()}
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_name_in_a_torch_file_is_refused_and_not_repaired(path):
    held = rename(path, lambda name: name)
    (path / WEIGHTS).unlink()
    held = {one("_orig_mod.")(name): value for name, value in held.items()}
    torch.save(held, path / "pytorch_model.bin")
    assert verify_folder(str(path)).verdict.answer == "no"
    plan = plan_layout_repair(str(path))
    assert not plan.is_repaired
    assert "pytorch_model.bin" in plan.refused


def test_weights_without_an_optimizer_are_a_loss(path):
    for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin"):
        (path / name).unlink(missing_ok=True)
    rename(path, one("_orig_mod."))
    problems = verify_folder(str(path)).contents.problems
    (found,) = [problem for problem in problems if "prefix of a wrapper" in problem.what]
    assert (found.severity, found.loses) == ("warning", "1 of 28 weights")
    assert plan_layout_repair(str(path)).steps


@pytest.mark.parametrize(
    "names",
    [
        ["a.weight", "a.bias", "b.weight"],
        ["_orig_mod.a.weight", "_orig_mod.a.bias"],
        ["module.a.weight", "module.a.bias"],
        ["module.a.weight", "head.weight"],  # a model with a submodule of this name
        ["module.a.weight", "a.weight"],  # the average of a model beside the model
        ["n_averaged", "module.a.weight"],
        ["encoder._orig_mod.a.weight", "encoder._orig_mod.b.weight", "head.weight"],
        ["h.0._orig_mod.a.weight", "h.1._orig_mod.a.weight", "ln_f.weight"],
        ["_orig_mod.a.weight", "a.weight", "a.bias"],  # its own name is taken
    ],
)
def test_names_of_one_model_are_healthy(names):
    assert unwrapped_names(names) == {}


@pytest.mark.parametrize(
    ("names", "renamed"),
    [
        (["a.bias", "_orig_mod.a.weight"], {"_orig_mod.a.weight": "a.weight"}),
        (["b.bias", "_orig_mod.a.weight"], {"_orig_mod.a.weight": "a.weight"}),
        (["a.bias", "module.a.weight"], {"module.a.weight": "a.weight"}),
        (["e.a.bias", "e._orig_mod.a.weight"], {"e._orig_mod.a.weight": "e.a.weight"}),
    ],
)
def test_mix_has_one_right_name(names, renamed):
    assert unwrapped_names(names) == renamed
