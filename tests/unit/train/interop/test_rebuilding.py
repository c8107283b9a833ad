"""A state that is lost is rebuilt from what is left, and says what it does not know."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from resilient.errors import ConfigError, IncompatibleCheckpoint, IntegrityError
from resilient.train.hf_interop.checkpoint import TransformersCheckpoint
from resilient.train.hf_interop.rebuild import rebuild_checkpoint, rebuild_folder
from tests.helpers.hf_runs import make
from tests.unit.train.models import make_trainer

STATE = "trainer_state.json"


@pytest.fixture
def lost(theirs):
    """Return a folder without its state, and what that said."""
    state = json.loads((theirs / STATE).read_text())
    (theirs / STATE).unlink()
    return theirs, state


def add_sibling(folder, state, step):
    """Put a whole checkpoint of another step of the same run beside a folder."""
    beside = folder.with_name(f"checkpoint-{step}")
    shutil.copytree(folder, beside)
    said = {**state, "global_step": step, "epoch": state["epoch"] * step / state["global_step"]}
    said["log_history"] = [one for one in state["log_history"] if one["step"] <= step]
    (beside / STATE).write_text(json.dumps(said))


def bits(trainer):
    return {name: one.clone() for name, one in trainer.model.state_dict().items()}


def test_a_folder_alone_goes_on_at_its_step_and_says_that_its_place_is_lost(tmp_path, lost):
    folder, _ = lost
    out = tmp_path / "new" / "checkpoint-7"
    made = rebuild_folder(folder, out)
    assert (made.step, made.restores_progress) == (7, True)
    assert made.known["step"] == "the folder's name, scheduler.pt"
    assert set(made.lost) == {"place in the data", "history", "best model", "callbacks"}
    assert json.loads((out / "rebuilt.json").read_text())["lost"] == made.lost
    assert (out / "scheduler.pt").read_bytes() == (folder / "scheduler.pt").read_bytes()
    assert not (folder / STATE).exists(), "the source is only read"
    run = make("reg_sgd", tmp_path / "out")
    run.train(str(out))
    assert run.state.global_step == run.state.max_steps
    assert next(one["step"] for one in run.state.log_history if "loss" in one) == 8
    epoch = len(run.train_dataset)
    first = [index for indices, _ in run.seen for index in indices][:epoch]
    assert sorted(first) == list(range(epoch)), "the first epoch starts again"


@pytest.mark.parametrize("beside", [14, 3])
def test_with_a_sibling_it_goes_on_as_if_nothing_was_lost(tmp_path, lost, beside):
    folder, state = lost
    whole = tmp_path / "whole" / "checkpoint-7"
    shutil.copytree(folder, whole)
    (whole / STATE).write_text(json.dumps(state))
    add_sibling(folder, state, beside)
    made = rebuild_folder(folder, tmp_path / "new" / "checkpoint-7")
    assert ("history" in made.lost) == (beside < 7)
    assert "place in the data" not in made.lost
    runs = [make("reg_sgd", tmp_path / name) for name in ("one", "two")]
    runs[0].train(str(whole))
    runs[1].train(str(made.folder))
    assert runs[0].seen == runs[1].seen
    ended = bits(runs[1])
    assert all(torch.equal(one, ended[name]) for name, one in bits(runs[0]).items())
    steps = [one["step"] for one in runs[1].state.log_history if "loss" in one]
    assert steps[0] == (1 if state["log_history"] else 8)


def test_what_cannot_be_read_is_left_out_and_named(tmp_path, lost):
    folder, _ = lost
    for name in ("optimizer.pt", "rng_state.pth"):
        (folder / name).write_bytes((folder / name).read_bytes()[:-40])
    (folder / "scheduler.pt").unlink()
    made = rebuild_folder(folder, out := tmp_path / "checkpoint-70")
    assert {"optimizer", "scheduler", "random state"} <= set(made.lost)
    assert made.known["step"] == "the folder's name"
    assert not made.restores_progress
    assert TransformersCheckpoint(shutil.move(out, tmp_path / "new")).step == 7
    assert not (tmp_path / "new" / "optimizer.pt").exists()
    run = make("reg_sgd", tmp_path / "strict", strict_resume=True)
    with pytest.raises(IncompatibleCheckpoint, match="the optimizer's state and the schedule"):
        run.train(str(tmp_path / "new"))
    assert run.seen == []
    run = make("reg_sgd", tmp_path / "out")
    run.train(str(tmp_path / "new"))
    assert run.state.log_history[0]["step"] == 8
    lines = (tmp_path / "out" / "events" / "rank-0.jsonl").read_text().splitlines()
    told = [one for one in map(json.loads, lines) if one["event"] == "ImportLossReported"]
    assert "the optimizer's state and the schedule" in told[0]["lost"]


def test_half_a_state_is_as_good_as_none(tmp_path, theirs):
    (theirs / STATE).write_text((theirs / STATE).read_text()[:-30])
    assert rebuild_folder(theirs, tmp_path / "new").step == 7


def test_files_of_several_steps_are_refused(tmp_path, lost):
    folder, _ = lost
    moved = folder.rename(folder.with_name("checkpoint-9"))
    with pytest.raises(IntegrityError, match=r"the folder's name 9, scheduler\.pt 7"):
        rebuild_folder(moved, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_weights_alone_have_the_step_of_their_folder_or_none(tmp_path, lost):
    folder, _ = lost
    for one in list(folder.iterdir()):
        if one.name != "model.safetensors":
            one.unlink()
    made = rebuild_folder(folder, tmp_path / "new")
    assert (made.step, made.known["step"]) == (7, "the folder's name")
    with pytest.raises(ConfigError, match=r"the step of .* is unknown"):
        rebuild_folder(folder.rename(tmp_path / "weights"), tmp_path / "newer")


def test_what_is_whole_or_beyond_help_is_refused(tmp_path, theirs):
    with pytest.raises(ConfigError, match="is intact"):
        rebuild_folder(theirs, tmp_path / "new")
    (theirs / STATE).unlink()
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        rebuild_folder(theirs, tmp_path / "there")
    weights = theirs / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(IntegrityError):
        rebuild_folder(theirs, tmp_path / "new")


@pytest.fixture
def ours(tmp_path):
    """Return a repository of ours, and its newest checkpoint's folder."""
    make_trainer(tmp_path / "run", max_steps=4, gradient_accumulation_steps=2).train()
    return tmp_path / "run", tmp_path / "run" / "checkpoint-4-g1"


def test_ours_without_its_state_goes_on_from_its_step(tmp_path, ours):
    run, checkpoint = ours
    (checkpoint / STATE).unlink()
    made = rebuild_checkpoint(str(run), tmp_path / "new" / "checkpoint-4")
    assert (made.step, made.restores_progress) == (4, True)
    assert set(made.lost) == {"history", "best model"}
    state = json.loads((tmp_path / "new" / "checkpoint-4" / STATE).read_text())
    assert state["epoch"] == 8 / 13
    assert state["train_batch_size"] == 4
    again = make_trainer(tmp_path / "again", max_steps=6, gradient_accumulation_steps=2)
    again.train(made.folder)
    assert again.state.global_step == 6
    assert [one["step"] for one in again.state.log_history if "loss" in one] == [6]


def test_ours_with_only_weights_left_keeps_them_to_the_bit(tmp_path, ours):
    run, checkpoint = ours
    trained = make_trainer(tmp_path / "other")
    trained.load_model(str(checkpoint))
    (checkpoint / "state.json").unlink()
    made = rebuild_checkpoint(str(run), tmp_path / "new")
    assert not made.restores_progress
    assert {"optimizer", "scheduler", "callbacks"} <= set(made.lost)
    assert "history" not in made.lost, "it lies in a file of its own"
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(one, found[name]) for name, one in bits(trained).items())


def test_ours_that_is_whole_or_has_no_weights_is_refused(tmp_path, ours):
    run, checkpoint = ours
    with pytest.raises(ConfigError, match="is intact: there is nothing to rebuild"):
        rebuild_checkpoint(str(run), tmp_path / "new")
    (checkpoint / "model.r00000.safetensors").unlink()
    with pytest.raises(IntegrityError):
        rebuild_checkpoint(str(run), tmp_path / "new")
    assert not (tmp_path / "new").exists()
