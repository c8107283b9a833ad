"""Checkpoints that hold the model alone, and taking only the model of any checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from resilient.errors import IncompatibleCheckpoint, NothingToResume, RepositoryNotFound
from resilient.train.model.weights_io import split_reference
from tests.unit.train.fakes import equal
from tests.unit.train.models import make_trainer


def run(folder, **options):
    trainer = make_trainer(folder, max_steps=4, save_steps=2, size=20, **options)
    trainer.train()
    return trainer


def test_such_a_checkpoint_holds_the_model_and_the_history(tmp_path):
    trainer = run(tmp_path, save_only_model=True)
    names = {one.name.partition(".")[0] for one in (tmp_path / "checkpoint-4-g1").iterdir()}
    assert "trainer_state" in names
    manifest = json.loads((tmp_path / "checkpoint-4-g1" / "manifest.json").read_text())
    assert {one["name"] for one in manifest["parts"]} == {"model", "trainer_state"}
    other = make_trainer(tmp_path / "other")
    assert other.load_model(str(tmp_path)) == "checkpoint-4-g1"
    assert equal(other.model.state_dict(), trainer.model.state_dict())


def test_training_does_not_go_on_from_a_model_alone(tmp_path):
    run(tmp_path, save_only_model=True)
    with pytest.raises(IncompatibleCheckpoint, match="only a model"):
        make_trainer(tmp_path, max_steps=6, size=20).train()
    assert make_trainer(tmp_path, max_steps=6, size=20).train(False).global_step == 6


def test_the_best_of_models_alone_is_loaded(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_size": 8}
    trainer = run(tmp_path, save_only_model=True, load_best_model_at_end=True, **options)
    assert trainer.state.best_global_step in (2, 4)


def test_only_the_weights_of_a_whole_checkpoint_are_taken(tmp_path):
    first = run(tmp_path / "first")
    before = sorted((tmp_path / "first").rglob("*.json"))
    second = make_trainer(tmp_path / "second", max_steps=4, save_strategy="no", size=20)
    assert second.load_model(str(tmp_path / "first" / "checkpoint-4")) == "checkpoint-4-g1"
    assert equal(second.model.state_dict(), first.model.state_dict())
    assert second.state.global_step == 0
    assert second.optimizer is None
    assert second.train().global_step == 4
    assert sorted((tmp_path / "first").rglob("*.json")) == before


def test_a_missing_or_unfit_checkpoint_leaves_the_model_as_it_was(tmp_path):
    run(tmp_path / "first")
    trainer = make_trainer(tmp_path / "second")
    before = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    with pytest.raises(NothingToResume):
        trainer.load_model(str(tmp_path / "first" / "checkpoint-3"))
    with pytest.raises(RepositoryNotFound):
        trainer.load_model(str(tmp_path / "nothing"))
    assert equal(dict(trainer.model.state_dict()), before)
    trainer.model.layers[4] = torch.nn.Linear(16, 2)
    with pytest.raises(IncompatibleCheckpoint):
        trainer.load_model(str(tmp_path / "first"))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("runs/a/checkpoint-3", ("runs/a", "checkpoint-3")),
        ("s3://lab/a/checkpoint-3-g2/", ("s3://lab/a", "checkpoint-3-g2")),
        ("checkpoint-3", ("here", "checkpoint-3")),
        ("latest~1", ("here", "latest~1")),
        ("best:loss", ("here", "best:loss")),
        ("120", ("here", "120")),
        ("runs/a", ("runs/a", "latest")),
        ("runs", ("runs", "latest")),
        ("/checkpoint-3", ("/", "checkpoint-3")),
    ],
)
def test_what_people_write_names_a_repository_and_a_checkpoint(said, meant):
    assert split_reference(said, "here") == meant
