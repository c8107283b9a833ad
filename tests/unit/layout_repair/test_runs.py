"""A repaired training state loads in its own tool like the undamaged state."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from resilient.errors import ConfigError
from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from resilient.layout_repair.trainer_state_repair import parse_truncated_json
from resilient.layouts.hf_trainer import KEYS
from tests.helpers.foreign_folders import (
    train_further,
    write_accelerate,
    write_megatron,
    write_slices,
    write_titan,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers"
STATE, SCHEDULE = "trainer_state.json", "scheduler.pt"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "run")) / "checkpoint-8"


def mend(path, *others):
    plan = plan_layout_repair(str(path), [str(one) for one in others])
    return plan, write_repaired(plan, place_of(plan))


def contents(path):
    return {one: one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def beside(run, step):
    """Leave another step of the run, whose schedule and history are further or less far."""
    other = Path(shutil.copytree(run, run.with_name(f"checkpoint-{step}")))
    state = json.loads((other / STATE).read_text())
    state |= {"global_step": step, "epoch": state["epoch"] * step / 8}
    state["log_history"] = [one for one in state["log_history"] if one["step"] <= step]
    state["log_history"] += [{"step": step, "epoch": state["epoch"], "loss": 1.0}]
    (other / STATE).write_text(json.dumps(state))
    schedule = torch.load(other / SCHEDULE)
    schedule |= {"last_epoch": step, "_step_count": step + 1, "_last_lr": [0.5, 0.5]}
    torch.save(schedule, other / SCHEDULE)
    train_further(other)
    return other


@pytest.mark.parametrize("step", [6, 12])
def test_a_schedule_is_what_it_was_to_the_bit(run, step):
    whole = torch.load(run / SCHEDULE)
    beside(run, step)
    (run / SCHEDULE).unlink()
    plan, made = mend(run)
    assert (plan.is_whole, plan.losses) == (True, {})
    assert torch.load(made / SCHEDULE, weights_only=True) == whole


def test_a_schedule_of_which_nothing_says_the_kind_is_not_made_up(run):
    (run / SCHEDULE).unlink()
    plan = plan_layout_repair(str(run))
    assert not plan.is_repaired
    assert "its kind is unknown" in plan.refused[SCHEDULE]


def test_the_arguments_say_the_kind(tmp_path):
    pytest.importorskip("transformers")
    from transformers import TrainingArguments

    path = Path(shutil.copytree(GOLDEN / "gpt2_all" / "run", tmp_path / "run")) / "checkpoint-8"
    whole = torch.load(path / SCHEDULE)
    arguments = TrainingArguments(str(tmp_path / "out"), lr_scheduler_type="cosine", use_cpu=True)
    torch.save(arguments, path / "training_args.bin")
    (path / SCHEDULE).write_bytes(b"")
    plan, made = mend(path)
    found = torch.load(made / SCHEDULE, weights_only=True)
    assert plan.is_whole
    assert {**found, "lr_lambdas": whole["lr_lambdas"]} == whole
    arguments.lr_scheduler_type = "reduce_lr_on_plateau"
    torch.save(arguments, path / "training_args.bin")
    assert "reduce_lr_on_plateau" in plan_layout_repair(str(path)).refused.get(SCHEDULE, "") or (
        "the schedule" in plan_layout_repair(str(path)).losses
    )


def test_a_state_comes_back_from_a_later_step_and_says_what_does_not(run):
    whole = json.loads((run / STATE).read_text())
    beside(run, 12)
    (run / STATE).unlink()
    before = contents(run)
    plan, made = mend(run)
    found = json.loads((made / STATE).read_text())
    same = set(KEYS) - {"total_flos"}
    assert {key: found[key] for key in same} == {key: whole[key] for key in same}
    assert "counts" in plan.losses
    assert not {"history", "best model", "epoch"} & set(plan.losses)
    assert contents(run) == before, "the source is only read"
    assert json.loads((made / "repaired.json").read_text())["losses"] == dict(plan.losses)


def test_the_place_of_a_callback_is_another_step_s_and_told(run):
    other = beside(run, 12)
    state = json.loads((other / STATE).read_text())
    state["stateful_callbacks"]["EarlyStoppingCallback"] = {"args": {}, "attributes": {"n": 2}}
    (other / STATE).write_text(json.dumps(state))
    (run / STATE).unlink()
    plan, made = mend(run)
    found = json.loads((made / STATE).read_text())["stateful_callbacks"]
    assert found == state["stateful_callbacks"]
    assert "another step" in plan.losses["callbacks"]


def test_a_state_that_was_cut_keeps_what_is_whole_of_it(run):
    text = (run / STATE).read_text()
    whole = json.loads(text)
    (run / STATE).write_text(text[: text.index('"step": 6')])
    plan, made = mend(run)
    found = json.loads((made / STATE).read_text())
    for key in ("best_metric", "best_global_step", "epoch", "global_step"):
        assert found[key] == whole[key]
    assert found["log_history"] == whole["log_history"][:5]
    assert "history" in plan.losses


def test_every_cut_of_a_document_is_a_part_of_it():
    value = {"a": [1, {"b": 'c\\"'}, 22], "n": 123, "z": {"y": None}}
    text = json.dumps(value)
    for end in range(len(text)):
        for key, one in parse_truncated_json(text[:end]).items():
            assert one == value[key] or one == value[key][: len(one)]
    assert parse_truncated_json(text) == value


def test_a_broken_random_state_is_left_out_and_told(run):
    (run / "rng_state.pth").write_bytes(b"PK")
    plan, made = mend(run)
    assert list(plan.losses) == ["random state"]
    assert not (made / "rng_state.pth").exists()


def test_the_best_pointer_leads_to_its_step_again_or_nowhere(run):
    state = json.loads((run / STATE).read_text())
    for step, is_there in ((8, True), (4, False)):
        moved = {"best_model_checkpoint": "/old/checkpoint-3", "best_global_step": step}
        (run / STATE).write_text(json.dumps(state | moved))
        plan = plan_layout_repair(str(run))
        best = json.loads(b"".join(plan.draft.blocks(STATE)))["best_model_checkpoint"]
        assert best == (str(run) if is_there else None)
        assert ("best checkpoint" in plan.losses) != is_there


@pytest.mark.parametrize("spoil", [Path.unlink, lambda one: one.write_bytes(b"\x80\x04junk")])
def test_an_index_of_slices_comes_from_another_step_and_the_slices(tmp_path, spoil):
    path = write_titan(tmp_path)
    write_titan(tmp_path, 8)
    whole = (path / ".metadata").read_bytes()
    spoil(path / ".metadata")
    plan, made = mend(path)
    assert plan.is_whole, plan
    (path / ".metadata").write_bytes(whole)
    found, expected = (dcp.FileSystemReader(one).read_metadata() for one in (made, path))
    assert found.storage_data == expected.storage_data
    assert found.state_dict_metadata == expected.state_dict_metadata


def test_an_index_is_not_made_of_slices_that_are_damaged_or_another_model(tmp_path):
    path = write_titan(tmp_path)
    other = write_titan(tmp_path, 8)
    (path / ".metadata").unlink()
    slices = path / "__0_0.distcp"
    whole = slices.read_bytes()
    at = whole.find(struct.pack("<f", 14.0))
    slices.write_bytes(whole[:at] + bytes([whole[at] ^ 3]) + whole[at + 1 :])
    plan = plan_layout_repair(str(path))
    assert not plan.is_repaired
    assert "does not fit" in plan.refused[".metadata"]
    slices.write_bytes(whole)
    shutil.rmtree(other)
    assert "were only there" in plan_layout_repair(str(path)).refused[".metadata"]


def test_an_index_of_another_model_is_not_taken(tmp_path):
    for step, shape in ((8, 3), (9, 4)):
        write_slices({"model": {"w": torch.ones(shape)}}, tmp_path / f"step-{step}")
    (tmp_path / "step-9" / ".metadata").unlink()
    plan = plan_layout_repair(str(tmp_path / "step-9"))
    assert not plan.is_repaired
    assert "has no `model.w` at its place" in plan.refused[".metadata"]


def test_another_copy_gives_what_is_damaged_and_only_if_it_is_the_same(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "copy" / "checkpoint-8"))
    weights = run / "model.safetensors"
    whole = contents(run)
    weights.write_bytes(weights.read_bytes()[:-40])
    (run / STATE).unlink()
    plan, made = mend(run, copy)
    assert plan.is_whole
    assert {
        one.name: data for one, data in contents(made).items() if one.name != "repaired.json"
    } == {one.name: data for one, data in whole.items()}
    (copy / "config.json").write_text("{}")
    other = plan_layout_repair(str(run), [str(copy)])
    assert not other.is_repaired
    assert "two checkpoints" in other.refused["config.json"]


def test_what_nothing_mends_is_saved_tensor_by_tensor(run):
    weights = run / "model.safetensors"
    whole = load_file(weights)
    weights.write_bytes(weights.read_bytes()[:-4000])
    plan, made = mend(run)
    assert not plan.is_repaired
    assert made.parent.name == "salvaged"
    found = load_file(made / "model.safetensors.salvaged.safetensors")
    lost = json.loads((made / "repaired.json").read_text())["lost_tensors"]["model.safetensors"]
    assert set(found) | set(lost) == set(whole)
    assert lost
    assert all(torch.equal(one, whole[name]) for name, one in found.items())
    assert not (made / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="exists already"):
        write_repaired(plan, made)


def test_of_slices_and_torch_files_the_whole_tensors_are_saved(tmp_path):
    path = write_titan(tmp_path)
    slices = path / "__0_0.distcp"
    slices.write_bytes(slices.read_bytes()[:-9000])
    plan = plan_layout_repair(str(path))
    (one,) = plan.salvaged
    assert one.saved
    assert one.lost
    torch.save({"model": {"a": torch.arange(9.0), "b": torch.ones(900)}}, tmp_path / "last.pt")
    file = tmp_path / "last.pt"
    file.write_bytes(file.read_bytes()[:1200])
    plan, made = mend(file)
    found = load_file(made / "last.pt.salvaged.safetensors")
    assert torch.equal(found["model.a"], torch.arange(9.0))


def test_accelerate_gets_its_schedule_from_another_save(tmp_path):
    write_accelerate(tmp_path / "checkpoint_0", tmp_path / "checkpoint_1")
    path = tmp_path / "checkpoint_0"
    whole = torch.load(path / "scheduler.bin")
    (path / "scheduler.bin").unlink()
    plan, made = mend(path)
    assert plan.is_whole
    assert torch.load(made / "scheduler.bin", weights_only=True) == whole


def test_a_broken_configuration_comes_from_another_step_or_is_left_out(run):
    whole = (run / "config.json").read_bytes()
    (run / "config.json").write_text("{")
    plan, made = mend(run)
    assert list(plan.losses) == ["the model's configuration"]
    assert not (Path(made) / "config.json").exists()
    other = beside(run, 12)
    (other / "config.json").write_bytes(whole)
    plan = plan_layout_repair(str(run))
    assert (plan.is_whole, plan.losses) == (True, {})


def test_broken_arguments_stay_because_no_resume_reads_them(run):
    path = run / "training_args.bin"
    torch.save({"seed": 1}, path)
    path.write_bytes(path.read_bytes()[:100])
    plan = plan_layout_repair(str(run))
    assert [plan.steps, plan.losses, plan.refused] == [(), {}, {}]
    assert (plan.is_damaged, plan.verdict.answer) == (False, "yes")


@pytest.mark.parametrize(
    ("write", "file"), [(write_titan, "__0_1.distcp"), (write_megatron, "common.pt")]
)
def test_a_folder_with_a_file_of_another_step_is_not_named_for_that_one(tmp_path, write, file):
    path, other = write(tmp_path, files=2), write(tmp_path, 8, files=2)
    copy = Path(shutil.copytree(path, tmp_path / "copy" / path.name))
    shutil.copy(other / file, path / file)
    plan = plan_layout_repair(str(path))
    assert not plan.is_repaired
    assert plan.refused["."]
    repaired_plan = plan_layout_repair(str(path), [str(copy)])
    assert repaired_plan.is_whole, repaired_plan
    assert b"".join(repaired_plan.draft.blocks(file)) == (copy / file).read_bytes()
    shutil.rmtree(other)
    # All that counts steps in Megatron is in this one file, so that the name is right is a guess.
    assert plan_layout_repair(str(path)).is_repaired == (file == "common.pt")
