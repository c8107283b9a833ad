from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.train.models import make_trainer

DEATHS = [6, 14, 22]


def read(folder):
    """Return what TensorBoard shows of a folder: (name, step, value), and the texts' names."""
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    shown.Reload()
    points = [
        (name, one.step, one.value)
        for name in shown.Tags()["scalars"]
        for one in shown.Scalars(name)
    ]
    return sorted(points), shown.Tags()["tensors"]


def runs_of(folder):
    return sorted((folder / "runs").iterdir())


def test_three_deaths_leave_one_curve_equal_to_the_unbroken_runs(lives, tmp_path, timeless):
    lives("unbroken", [], report_to="tensorboard")
    lives("broken", DEATHS, report_to="tensorboard")
    (straight,), (broken,) = runs_of(tmp_path / "unbroken"), runs_of(tmp_path / "broken")
    assert len(list(broken.glob("*tfevents*"))) == 4
    curve, _ = read(broken)
    assert timeless(curve) == timeless(read(straight)[0])
    drawn = [point[:2] for point in curve]
    assert len(drawn) == len(set(drawn))
    steps = {step for name, step, _ in curve if name == "train/loss"}
    assert steps == set(range(3, 25, 3))
    assert {"eval/loss", "train/grad_norm", "train/learning_rate", "eval/runtime"} <= {
        name for name, _, _ in curve
    }


def test_a_folder_that_was_lost_gets_the_whole_history_again(lives, tmp_path, timeless):
    def lose():
        for file in (tmp_path / "moved").rglob("*tfevents*"):
            file.unlink()
        return []

    lives("kept", [], report_to="tensorboard")
    lives("moved", [14], report_to="tensorboard", callbacks=lose)
    (kept,), (moved,) = runs_of(tmp_path / "kept"), runs_of(tmp_path / "moved")
    assert len(list(moved.glob("*tfevents*"))) == 1
    assert timeless(read(moved)[0]) == timeless(read(kept)[0])


def test_logging_dir_is_the_folder_and_holds_the_arguments(repository, tmp_path):
    folder = tmp_path / "curves"
    trainer = make_trainer(
        tmp_path / "out",
        report_to=["tensorboard"],
        logging_dir=str(folder),
        hub_token="hf_secret",  # noqa: S106
    )
    trainer.train()
    assert not (tmp_path / "out" / "runs").exists()
    curve, texts = read(folder)
    assert ("train/train_loss", 26) in {point[:2] for point in curve}
    assert "args/text_summary" in texts
    assert b"hf_secret" not in b"".join(one.read_bytes() for one in folder.iterdir())


def test_the_environment_names_the_folder(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "named"))
    make_trainer(tmp_path / "out", report_to="tensorboard", max_steps=3).train()
    assert read(tmp_path / "named")[0]


def test_what_is_evaluated_after_training_is_drawn_once_per_run(repository, tmp_path):
    for _ in range(2):
        trainer = make_trainer(tmp_path, eval_size=7, report_to="tensorboard", max_steps=8)
        trainer.train()
        trainer.evaluate()
        trainer.callback_handler.close()
    (run,) = runs_of(tmp_path)
    points = [point[:2] for point in read(run)[0]]
    assert points.count(("eval/loss", 8)) == 1
    assert points.count(("train/train_loss", 8)) == 1


def test_two_runs_of_one_second_have_folders_of_their_own(lives, tmp_path):
    for _ in range(2):
        lives("twice", [], report_to="tensorboard", max_steps=3)
    assert len(runs_of(tmp_path / "twice")) == 2


def test_the_checkpoint_names_the_run_and_the_step(repository, tmp_path):
    make_trainer(tmp_path, report_to="tensorboard", max_steps=8).train()
    (run,) = runs_of(tmp_path)
    saved = repository.checkpoints[max(repository.checkpoints)]["callbacks"]["ReportTo"]
    assert saved["tensorboard"]["run_id"] == run.name
    assert saved["tensorboard"]["step"] in {0, 3, 6}
    assert json.dumps(saved)
    assert isinstance(run, Path)
