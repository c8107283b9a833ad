"""Files and folders that are gone, where others beside them would pass for what they were."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import TrainingArguments

from resilient.layout_repair.plan import plan_layout_repair
from resilient.layouts.detect import read_layout
from resilient.layouts.model import Remedy
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import open_folder
from tests.helpers.foreign_folders import verdict

HERE = Path(__file__).parents[2] / "golden" / "transformers"


@pytest.fixture
def single(tmp_path):
    source = HERE / "gpt2_all" / "run" / "checkpoint-8"
    return Path(shutil.copytree(source, tmp_path / "run" / source.name))


def best_at(single, step):
    path = single / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"] = [one for one in state["log_history"] if "eval_loss" not in one]
    best = {"best_model_checkpoint": f"run/checkpoint-{step}", "best_global_step": step}
    path.write_text(json.dumps(state | best))


@pytest.mark.parametrize("trace", ["latest", "zero_to_fp32.py"])
def test_the_file_of_the_model_is_no_engine_of_deepspeed(single, trace):
    (single / trace).write_text("global_step8")
    (single / "optimizer.pt").unlink()
    found = verdict(single)
    assert found.answer == "no"
    assert "the folder of DeepSpeed's engine is missing" in found.why[0]


def test_the_parts_of_an_optimizer_are_no_engine_without_its_model(single):
    (single / "optimizer.pt").unlink()
    (single / "global_step8").mkdir()
    (single / "global_step8" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")
    found = verdict(single)
    assert found.answer == "no"
    assert found.why[0].startswith("global_step8/: the engine's model states are missing")


def test_with_fsdp_the_trainer_wants_the_weights_of_fsdp(single):
    (single / "optimizer.pt").rename(single / "optimizer.bin")
    found = verdict(single)
    assert found.answer == "no"
    assert found.why[0].startswith("pytorch_model_fsdp.bin: it is missing")
    (single / "model.safetensors").rename(single / "pytorch_model_fsdp.bin")
    assert "it is missing" not in " ".join(verdict(single).why)


def test_a_best_checkpoint_that_is_gone_is_a_loss_and_one_beside_it_is_none(single):
    best_at(single, 4)
    found = verdict(single)
    assert (found.answer, found.why) == ("partly", ("the best checkpoint",))
    plan = plan_layout_repair(str(single))
    assert "best checkpoint" in plan.losses
    assert json.loads(plan.draft.read("trainer_state.json", 0, 1 << 20))["best_global_step"] == 4
    shutil.copytree(single, single.with_name("checkpoint-4"))
    assert verdict(single).answer == "yes"


def test_a_best_checkpoint_that_is_where_it_is_said_to_be_is_not_gone(single, monkeypatch):
    best_at(single, 4)
    elsewhere = single.parents[1] / "elsewhere"
    shutil.copytree(single, elsewhere / "run" / "checkpoint-4")
    monkeypatch.chdir(elsewhere)
    assert verdict(single).answer == "yes"


def best_unsaved(single, **fields):
    """Make 6 the best step, whose evaluation was not followed by a save; 4 is the best saved."""
    best_at(single, 4)
    path = single / "trainer_state.json"
    state = json.loads(path.read_text())
    state["log_history"].append({"eval_loss": 0.5, "step": 6, "epoch": 0.1})
    path.write_text(json.dumps(state | {"best_global_step": 6, "best_metric": 0.5} | fields))


def test_best_step_not_saved_keeps_the_best_saved_checkpoint(single):
    best_unsaved(single)
    assert verdict(single).why == ("the best checkpoint",)
    shutil.copytree(single, single.with_name("checkpoint-4"))
    assert verdict(single).answer == "yes"
    assert not plan_layout_repair(str(single)).losses
    moved = single.parent.rename(single.parents[1] / "moved") / single.name
    assert verdict(moved).answer == "yes"
    # A save at step 6 would have recorded its own folder.
    shutil.copytree(moved, moved.with_name("checkpoint-6"))
    assert verdict(moved).why == ("the best checkpoint",)


@pytest.mark.parametrize(
    "fields",
    [
        {"best_metric": 0.25},
        {"best_global_step": 8},
        {"best_global_step": 7},
        {"best_model_checkpoint": "run/checkpoint-7"},
        {"best_model_checkpoint": "run/best"},
    ],
)
def test_best_step_without_its_evaluation_is_a_loss(single, fields):
    best_unsaved(single, **fields)
    for step in (4, 7):
        shutil.copytree(single, single.with_name(f"checkpoint-{step}"))
    assert "the best checkpoint" in verdict(single).why


def test_best_path_of_a_version_without_a_best_step_is_repaired(single):
    best_at(single, 4)
    best_unsaved(single, best_global_step=None)
    shutil.copytree(single, single.with_name("checkpoint-4"))
    assert verdict(single).answer == "yes"


def test_random_states_that_are_gone_are_told_by_a_repair(single):
    (single / "rng_state.pth").unlink()
    (why,) = plan_layout_repair(str(single)).refused.values()
    assert why.startswith("no random states are saved, and they are lost")
    assert "Python, NumPy, torch and each GPU are created" in why


def test_the_random_state_of_a_rank_that_is_gone_is_told_with_its_rank(single):
    (single / "rng_state.pth").rename(single / "rng_state_0.pth")
    (why,) = plan_layout_repair(str(single)).refused.values()
    assert why.startswith("ranks without a random state: 1, and they are lost")
    assert "dropout, augmentation and samplers draw other numbers" in why


@pytest.mark.parametrize(("epoch", "answer"), [(0.9, "yes"), (1.25, "partly")])
def test_a_stream_is_found_again_in_its_first_pass_alone(single, epoch, answer):
    path = single / "trainer_state.json"
    state = json.loads(path.read_text())
    more = {"num_train_epochs": sys.maxsize, "epoch": epoch, "log_history": []}
    path.write_text(json.dumps(state | more))
    found = verdict(single)
    assert found.answer == answer
    assert found.why == (("the place in the data",) if answer == "partly" else ())


@pytest.mark.parametrize(("is_ignored", "answer"), [(False, "yes"), (True, "partly")])
def test_a_run_that_skips_no_data_has_no_place_in_them(single, is_ignored, answer):
    arguments = TrainingArguments(str(single), use_cpu=True, ignore_data_skip=is_ignored)
    torch.save(arguments, single / "training_args.bin")
    found = verdict(single)
    assert found.answer == answer
    assert found.why == (("the place in the data",) if is_ignored else ())


def test_a_folder_under_another_name_is_still_its_own_best(single):
    best_at(single, 8)
    told = verdict(single.rename(single.with_name("checkpoint-4711")))
    assert told.why == ("the consistency of its files",)


def test_weights_in_a_file_that_is_broken_are_not_missed_twice(single):
    weights = safetensors.torch.load_file(single / "model.safetensors")
    first = dict(list(weights.items())[:3])
    safetensors.torch.save_file(first, single / "model-00001-of-00002.safetensors")
    mapped = {one: f"model-0000{1 + (one not in first)}-of-00002.safetensors" for one in weights}
    index = {"metadata": {}, "weight_map": mapped}
    (single / "model.safetensors.index.json").write_text(json.dumps(index))
    (single / "model.safetensors").unlink()
    assert verdict(single).why == ("model-00002-of-00002.safetensors: it is missing",)


DATA_PARALLEL = HERE / "gpt2_ddp2_all" / "run" / "checkpoint-4"
SINGLE = HERE / "gpt2_all" / "run" / "checkpoint-8"


def leftover_of(tmp_path, source, name, ranks):
    path = Path(shutil.copytree(source, tmp_path / source.name))
    state = next(iter(sorted(path.glob("rng_state*.pth"))))
    shutil.copy(state, path / name)
    if ranks is not None:
        arguments = TrainingArguments(str(path), use_cpu=True)
        arguments.distributed_state.num_processes = ranks
        torch.save(arguments, path / "training_args.bin")
    folder = open_folder(str(path))
    return path, read_layout(folder, folder.list())


@pytest.mark.parametrize(
    ("source", "name", "told", "ranks"),
    [
        (DATA_PARALLEL, "rng_state_2.pth", 2, 2),
        (DATA_PARALLEL, "rng_state.pth", 2, 2),
        (SINGLE, "rng_state_2.pth", 1, 1),
        (SINGLE, "rng_state_2.pth", None, 1),
    ],
)
def test_leftover_random_state_is_a_note_and_no_loss(tmp_path, source, name, told, ranks):
    path, contents = leftover_of(tmp_path, source, name, told)
    assert contents.rng.ranks == tuple(range(ranks))
    assert contents.world == ranks
    assert assess_resumability(contents, str(path)).answer == "yes"
    (problem,) = contents.problems
    assert (problem.place, problem.severity, problem.cure) == (name, "note", Remedy.NEEDLESS)
    plan = plan_layout_repair(str(path))
    assert [plan.steps, plan.losses, plan.refused] == [(), {}, {}]
