"""Pains of the field with the best model, each by the number of the report, with real saves."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.refs import resolve
from resilient.errors import ConfigError
from resilient.storage.local import LocalStore
from resilient.train.arguments import TrainingArguments
from tests.unit.train.models import make_trainer

# With so large a rate and the direction turned round, the best is an early one.
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "eval_size": 8,
    "learning_rate": 1.0,
    "load_best_model_at_end": True,
    "greater_is_better": True,
    "num_train_epochs": 1,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RESILIENT_RESUME"):
        monkeypatch.delenv(name, raising=False)


def trained(folder, **options):
    trainer = make_trainer(folder, **{**BEST, **options})
    trainer.train()
    return trainer


def steps(folder):
    return [one.step for one in committed(LocalStore(folder))]


@pytest.mark.parametrize(("limit", "kept"), [(1, 2), (2, 2), (3, 3)])
def test_tf_35070_a_limit_of_one_with_a_best_keeps_the_best_and_the_newest(tmp_path, limit, kept):
    trainer = trained(tmp_path, save_total_limit=limit)
    best, newest = trainer.state.best_global_step, trainer.state.global_step
    assert best != newest, "the test needs a run that gets worse"
    there = steps(tmp_path)
    assert there[0] == newest
    assert there[-1] == best
    assert len(there) == kept


def test_tf_19300_who_means_the_best_three_says_so(tmp_path):
    trainer = trained(
        tmp_path,
        save_total_limit=1,
        save_retention={"keep_best": {"metric": "loss", "count": 3, "greater_is_better": True}},
    )
    losses = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    best = sorted(losses, key=losses.get, reverse=True)[:3]
    assert sorted(steps(tmp_path)) == sorted({*best, trainer.state.global_step})


@pytest.mark.parametrize("limit", [0, -3])
def test_tf_25129_a_limit_below_one_is_refused(tmp_path, limit):
    with pytest.raises(ConfigError, match="keep at least 1"):
        TrainingArguments(output_dir=str(tmp_path), save_total_limit=limit)


def test_tf_48315_a_folder_that_moved_still_has_its_best_model(tmp_path):
    first = trained(tmp_path / "here", save_total_limit=1)
    shutil.move(tmp_path / "here", tmp_path / "there")
    again = trained(tmp_path / "there", save_total_limit=1)
    for name, one in first.model.state_dict().items():
        assert torch.equal(one, again.model.state_dict()[name])


def test_tf_10412_a_best_that_somebody_deleted_is_told_and_the_finished_run_does_not_crash(
    tmp_path, capsys
):
    first = trained(tmp_path, save_total_limit=1)
    [folder] = tmp_path.glob(f"checkpoint-{first.state.best_global_step}-g1")
    shutil.rmtree(folder)
    trained(tmp_path, save_total_limit=1)
    said = capsys.readouterr().err
    assert "the best model was not loaded" in said
    assert folder.name in said


def test_what_was_measured_is_in_the_manifest_and_finds_the_best(tmp_path):
    trainer = trained(tmp_path)
    store = LocalStore(tmp_path)
    measured = read_manifest(store, resolve(store, f"step:{trainer.state.best_global_step}"))
    assert measured.metrics == {"eval_loss": trainer.state.best_metric}
    assert resolve(store, "best:loss:1:max").step == trainer.state.best_global_step
    newest = read_manifest(store, resolve(store, "latest"))
    assert [one.step for one in newest.protects] == [trainer.state.best_global_step]


def test_a_retention_that_makes_no_sense_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="has no option `keep_lost`"):
        TrainingArguments(output_dir=str(tmp_path), save_retention={"keep_lost": 1})
    args = TrainingArguments(output_dir=str(tmp_path), save_retention={"keep_best": "loss:2"})
    assert json.loads(args.to_json_string())["save_retention"] == {"keep_best": "loss:2"}
