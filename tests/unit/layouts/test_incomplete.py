"""Incomplete checkpoints, staging folders, Git LFS pointers, and healthy folders that look odd."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from resilient.layout_repair.plan import plan_layout_repair
from resilient.layouts.detect import read_layout
from resilient.layouts.model import Problem
from resilient.layouts.resumability import assess_resumability, is_costly, reasons, remedy
from resilient.layouts.run_folder import checkpoints_in
from resilient.layouts.training_state import OLDER
from resilient.storage.folder import open_folder

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
STATE, SENTINEL = "trainer_state.json", "checkpoint-is-incomplete.txt"
LATER = ("optimizer.pt", "scheduler.pt", "rng_state.pth", STATE)


@pytest.fixture
def checkpoint(tmp_path):
    return Path(shutil.copytree(GOLDEN, tmp_path / GOLDEN.name))


def test_each_reason_is_given_once():
    checksum = Problem("last.ckpt", "the checksum of `data.pkl` is wrong", is_fatal=True)
    missing = Problem(".", "it has no weights", is_fatal=True)
    text = "last.ckpt: the checksum of `data.pkl` is wrong"
    assert reasons([checksum, checksum, missing, checksum]) == (text, "it has no weights")


def read(path):
    folder = open_folder(str(path))
    contents = read_layout(folder, folder.list())
    return contents, assess_resumability(contents, str(path))


def without(path, *names):
    for one in names:
        (path / one).unlink()
    return path


def changed(path, change):
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


@pytest.mark.parametrize("kept", [0, 1])
def test_save_cut_short_is_incomplete_and_names_what_lacks(checkpoint, kept):
    without(checkpoint, *LATER[kept:])
    contents, verdict = read(checkpoint)
    assert (contents.layout, verdict.answer) == ("hf-trainer", "no")
    assert "incomplete checkpoint: its save ended early; it lacks " in verdict.why[0]
    for one in (*LATER[kept:2], "random states", STATE):
        assert one in verdict.why[0]
    assert not any("repair" in one.help for one in contents.problems)


def test_weights_in_a_folder_of_another_name_stay_a_model(checkpoint):
    model = without(checkpoint, *LATER).rename(checkpoint.with_name("model-8"))
    assert read(model)[0].layout == "hf-model"


def test_repair_of_incomplete_save_changes_nothing(checkpoint):
    (checkpoint / SENTINEL).touch()
    plan = plan_layout_repair(str(checkpoint))
    assert (plan.steps, plan.is_repaired, plan.is_damaged) == ((), False, True)
    assert "incomplete" in plan.refused[SENTINEL]
    assert plan.verdict.answer == "no"


def test_repair_of_incomplete_save_rebuilds_no_state(checkpoint):
    (checkpoint / SENTINEL).touch()
    without(checkpoint, STATE)
    assert plan_layout_repair(str(checkpoint)).steps == ()


def test_repair_of_incomplete_save_takes_a_whole_copy(checkpoint, tmp_path):
    copy = shutil.copytree(GOLDEN, tmp_path / "copy" / GOLDEN.name)
    without(checkpoint, *LATER)
    plan = plan_layout_repair(str(checkpoint), [str(copy)])
    assert plan.is_whole
    assert plan.verdict.answer == "yes"


@pytest.mark.parametrize(
    "name",
    ["tmp-checkpoint-18", "checkpoint-18.tmp", "checkpoint-18.orbax-checkpoint-tmp-1700000000"],
)
def test_staging_folder_is_incomplete_and_in_no_list(checkpoint, name):
    staged = checkpoint.rename(checkpoint.with_name(name))
    verdict = read(staged)[1]
    assert verdict.answer == "no"
    assert "staging folder" in verdict.why[0]
    shutil.copytree(GOLDEN, staged.with_name("checkpoint-6"))
    assert checkpoints_in(open_folder(str(staged.parent)).list()) == ["checkpoint-6"]


@pytest.mark.parametrize("name", ["tmp-abc123", "tmp.k30vD4Np9y", "checkpoint-18-final"])
def test_other_names_are_no_staging_folders(checkpoint, name):
    assert read(checkpoint.rename(checkpoint.with_name(name)))[1].answer != "no"


@pytest.mark.parametrize("name", [STATE, "config.json", "rng_state.pth", "training_args.bin"])
def test_pointer_of_git_lfs_is_fetched_and_not_repaired(checkpoint, name):
    (checkpoint / name).write_text(POINTER)
    contents, verdict = read(checkpoint)
    (problem,) = (one for one in contents.problems if one.place == name)
    assert "it is a pointer of Git LFS" in problem.what
    assert remedy(problem, str(checkpoint)) == f"cd {checkpoint} && git lfs pull"
    if problem.is_fatal:
        assert verdict.command == f"cd {checkpoint} && git lfs pull"
    plan = plan_layout_repair(str(checkpoint))
    assert (plan.steps, list(plan.refused)) == ((), [name])


def test_pointer_of_a_tag_is_told(tmp_path):
    (tmp_path / "latest").write_text(POINTER)
    tag = tmp_path / "global_step3"
    tag.mkdir()
    torch.save({"module": {}}, tag / "mp_rank_00_model_states.pt")
    told = {one.place: one for one in read(tmp_path)[0].problems}
    assert "git lfs pull" in told["latest"].help


def test_fp16_update_skipped_by_scaler_is_healthy(checkpoint):
    torch.save({"scale": 32768.0, "_growth_tracker": 0}, checkpoint / "scaler.pt")
    changed(checkpoint / "scheduler.pt", lambda one: one.update(last_epoch=7, _step_count=8))
    changed(
        checkpoint / "optimizer.pt",
        lambda one: [each["step"].sub_(1) for each in one["state"].values()],
    )
    assert read(checkpoint)[1].answer == "yes"
    plan = plan_layout_repair(str(checkpoint))
    assert (plan.steps, plan.after) == ((), ())


def test_schedule_behind_alone_is_no_skipped_update(checkpoint):
    torch.save({"scale": 32768.0, "_growth_tracker": 0}, checkpoint / "scaler.pt")
    changed(checkpoint / "scheduler.pt", lambda one: one.update(last_epoch=7, _step_count=8))
    assert read(checkpoint)[1].answer == "partly"


def test_repair_after_skipped_update_keeps_the_step(checkpoint):
    test_fp16_update_skipped_by_scaler_is_healthy(checkpoint)
    held = json.loads((checkpoint / STATE).read_text())
    (checkpoint / STATE).write_text(json.dumps(held)[:400])
    plan = plan_layout_repair(str(checkpoint))
    made = json.loads(b"".join(plan.draft.blocks(STATE)))
    assert made["global_step"] == held["global_step"] == 8
    assert plan.draft.url.endswith("checkpoint-8")


def greedy(optimizer):
    from transformers.optimization import GreedyLR

    return GreedyLR(optimizer)


@pytest.mark.parametrize("make", [torch.optim.lr_scheduler.ReduceLROnPlateau, greedy])
def test_schedule_by_metric_counts_evaluations(checkpoint, make):
    weight = torch.nn.Parameter(torch.ones(1))
    groups = torch.load(checkpoint / "optimizer.pt", weights_only=False)["param_groups"]
    optimizer = torch.optim.AdamW([{"params": [weight], "lr": one["lr"]} for one in groups[:1]])
    for one in groups[1:]:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": one["lr"]})
    schedule = make(optimizer)
    schedule.step(1.0)
    torch.save(schedule.state_dict(), checkpoint / "scheduler.pt")
    contents, verdict = read(checkpoint)
    assert (verdict.answer, contents.problems) == ("yes", ())
    assert (contents.schedule.step, contents.schedule.evaluations) == (None, 1)
    assert plan_layout_repair(str(checkpoint)).steps == ()


@pytest.mark.parametrize("is_list", [False, True])
def test_cuda_state_of_older_torch_is_named(checkpoint, is_list):
    old = torch.zeros(816, dtype=torch.uint8)
    name = "rng_state_0.pth" if is_list else "rng_state.pth"
    changed(checkpoint / "rng_state.pth", lambda one: one.update(cuda=[old] if is_list else old))
    (checkpoint / "rng_state.pth").rename(checkpoint / name)
    contents, _ = read(checkpoint)
    (problem,) = (one for one in contents.problems if one.place == name)
    assert problem.what == OLDER
    assert remedy(problem, str(checkpoint)).startswith("none: every copy")
    assert is_costly([problem])
    assert plan_layout_repair(str(checkpoint)).refused[name] == OLDER


@pytest.mark.parametrize("name", ["checkpoint-24", "step-3", "global_step6", "optimizer_0"])
def test_empty_folder_named_like_a_checkpoint_is_incomplete(tmp_path, name):
    path = tmp_path / name
    (path / "inner").mkdir(parents=True)
    contents, verdict = read(path)
    assert (contents.layout, verdict.answer) == ("empty", "no")
    assert verdict.why == ("it is an incomplete checkpoint: there is no file in it",)


@pytest.mark.parametrize("name", ["runs", "checkpoint", "notes-24"])
def test_other_empty_folder_is_no_checkpoint(tmp_path, name):
    (tmp_path / name).mkdir()
    folder = open_folder(str(tmp_path / name))
    assert read_layout(folder, folder.list()) is None


def test_empty_folder_takes_no_files_of_another_step(checkpoint):
    path = checkpoint.with_name("checkpoint-24")
    path.mkdir()
    plan = plan_layout_repair(str(path), (str(checkpoint),))
    assert not plan.is_repaired
    copy = shutil.copytree(checkpoint, checkpoint.parent / "copy" / "checkpoint-24")
    assert plan_layout_repair(str(path), (str(copy),)).is_repaired
