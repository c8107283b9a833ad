"""Problems of a checkpoint that its repair does not cure stay problems of the repaired copy."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from resilient.diff.verification import verify_folder
from resilient.layout_repair.plan import place_of, plan_layout_repair, write_repaired
from resilient_cli.foreign import inspect_foreign

GOLDEN = Path(__file__).parents[2] / "golden" / "transformers" / "gpt2_all" / "run" / "checkpoint-8"
WEIGHTS, SCHEDULE, RANDOM = "model.safetensors", "scheduler.pt", "rng_state.pth"
LOSSES = {WEIGHTS: "the weights of this step", RANDOM: "the random state"}


@pytest.fixture
def run(tmp_path):
    """Return the steps 8 and 12 of a run; step 12 has other weights, moments and random state."""
    paths = [Path(shutil.copytree(GOLDEN, tmp_path / "run" / f"checkpoint-{at}")) for at in (8, 12)]
    later = paths[1]
    held = {name: value * 2 for name, value in load_file(later / WEIGHTS).items()}
    save_file(held, later / WEIGHTS, {"format": "pt"})
    optimizer = torch.load(later / "optimizer.pt", weights_only=False)
    for state in optimizer["state"].values():
        state["exp_avg"].mul_(2)
        state["step"] += 4
    torch.save(optimizer, later / "optimizer.pt")
    schedule = torch.load(later / SCHEDULE, weights_only=False)
    schedule |= {"last_epoch": 12, "_step_count": 13}
    torch.save(schedule, later / SCHEDULE)
    random = torch.load(later / RANDOM, weights_only=False)
    random["cpu"][64:72] = 1
    torch.save(random, later / RANDOM)
    state = json.loads((later / "trainer_state.json").read_text())
    (later / "trainer_state.json").write_text(json.dumps(state | {"global_step": 12}))
    for path, at in zip(paths, (1e9, 1e9 + 900), strict=True):
        for file in path.iterdir():
            os.utime(file, (at, at))
    return paths[0]


def mend(path):
    plan = plan_layout_repair(str(path))
    return plan, write_repaired(plan, place_of(plan))


@pytest.mark.parametrize("name", [WEIGHTS, RANDOM])
def test_file_of_another_step_is_a_loss_of_the_repaired_copy(run, name):
    shutil.copy2(run.parent / "checkpoint-12" / name, run / name)
    (run / SCHEDULE).unlink()
    loss = LOSSES[name]
    assert loss in verify_folder(str(run)).verdict.lost
    plan, made = mend(run)
    assert plan.steps
    assert not plan.is_whole
    assert f"{name}: it is byte for byte that of checkpoint-12" in plan.losses[loss]
    assert json.loads((made / "repaired.json").read_text())["losses"] == dict(plan.losses)
    assert verify_folder(str(made)).verdict.lost == (loss,)


def test_repaired_copy_is_compared_with_the_steps_beside_its_source(run):
    shutil.copy2(run.parent / "checkpoint-12" / WEIGHTS, run / WEIGHTS)
    (run / SCHEDULE).unlink()
    _, made = mend(run)
    report = json.loads((made / "repaired.json").read_text())
    (made / "repaired.json").write_text(json.dumps(report | {"remaining": []}))
    told = [one.what for one in verify_folder(str(made)).contents.problems]
    assert any("byte for byte that of checkpoint-12" in one for one in told)


def test_repaired_copy_at_another_place_keeps_its_problems(run, tmp_path):
    whole = (run / WEIGHTS).read_bytes()
    shutil.copy2(run.parent / "checkpoint-12" / WEIGHTS, run / WEIGHTS)
    (run / SCHEDULE).unlink()
    _, made = mend(run)
    moved = Path(shutil.copytree(made, tmp_path / "elsewhere" / "checkpoint-8"))
    assert verify_folder(str(moved)).verdict.lost == (LOSSES[WEIGHTS],)
    (moved / WEIGHTS).write_bytes(whole)
    assert verify_folder(str(moved)).verdict.answer == "yes"


def test_doubtful_copy_is_a_note_before_and_after_the_repair(run):
    for file in (run.parent / "checkpoint-12").iterdir():
        os.utime(file, (1e9, 1e9))
    shutil.copy2(run.parent / "checkpoint-12" / WEIGHTS, run / WEIGHTS)
    (run / SCHEDULE).unlink()
    plan, made = mend(run)
    assert (plan.is_whole, plan.losses) == (True, {})
    assert "may have the file of this step" in plan.remaining[0].what
    (note,) = verify_folder(str(made)).contents.problems
    assert (note.severity, note.place) == ("note", WEIGHTS)


@pytest.mark.parametrize("what", [3, {"file": WEIGHTS}, {"file": "../x", "what": "y"}, None])
def test_report_of_another_form_adds_nothing(run, what):
    (run / "repaired.json").write_text(json.dumps({"remaining": [what], "source": 3}))
    assert verify_folder(str(run)).verdict.answer == "yes"


def test_next_of_a_lossy_copy_is_an_intact_checkpoint(run):
    shutil.copy2(run.parent / "checkpoint-12" / WEIGHTS, run / WEIGHTS)
    (run / SCHEDULE).unlink()
    _, made = mend(run)
    found = inspect_foreign(str(made), is_read=True)
    newer = run.with_name("checkpoint-12")
    assert verify_folder(str(newer)).verdict.answer == "yes"
    assert found.is_damaged
    assert found.verdict.command == f"resilient ckpt inspect {newer}"


@pytest.mark.parametrize("edited", [SCHEDULE, "trainer_state.json"])
def test_copy_that_kept_its_time_is_of_the_step_that_was_saved_then(run, edited):
    """The steps may be seconds apart, and another file of the step may be written later."""
    newer = run.parent / "checkpoint-12"
    for path, start in ((run, 1e9), (newer, 1e9 + 1)):
        for number, file in enumerate(sorted(path.iterdir())):
            os.utime(file, (start, start + number / 100))
    shutil.copy2(newer / WEIGHTS, run / WEIGHTS)
    os.utime(run / edited)
    assert verify_folder(str(run)).verdict.lost == (LOSSES[WEIGHTS],)
    assert verify_folder(str(newer)).verdict.answer == "yes"
