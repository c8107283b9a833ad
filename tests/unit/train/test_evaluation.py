from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from resilient.distributed.launch_env import World
from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.evaluation.loop import EvalAccumulator, EvalPrediction, EvalShard
from resilient.train.model.batch import find_labels, split_outputs
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import equal
from tests.unit.train.models import make_trainer


def test_the_loss_is_the_mean_over_samples_not_over_batches(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=11, per_device_eval_batch_size=4)
    data = trainer.eval_dataset
    with torch.no_grad():
        logits = trainer.model.eval()(data.x)["logits"].double()
        exact = nn.functional.cross_entropy(logits, data.y).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=1e-6)


def test_metrics_see_every_sample_once_in_order(tmp_path, repository):
    seen = []

    def compute(prediction: EvalPrediction):
        logits, labels = prediction
        seen.append((logits.shape, labels.tolist()))
        return {"accuracy": np.mean(logits.argmax(1) == labels), "eval_told": 1}

    trainer = make_trainer(tmp_path, eval_size=11)
    trainer.compute_metrics = compute
    metrics = trainer.evaluate()
    assert seen == [((11, 3), trainer.eval_dataset.y.tolist())]
    assert isinstance(metrics["eval_accuracy"], float)
    assert metrics["eval_told"] == 1


def test_speeds_are_told_but_not_kept(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=11)
    metrics = trainer.evaluate()
    assert metrics["eval_samples_per_second"] > 0
    assert trainer.state.log_history == [
        {"eval_loss": metrics["eval_loss"], "epoch": 0.0, "step": 0}
    ]


def test_evaluation_leaves_the_random_streams_and_the_mode_alone(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=11)
    trainer.model.train()
    before = torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(before, torch.get_rng_state())
    assert trainer.model.training


def test_a_dict_of_datasets_names_its_metrics(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=11)
    metrics = trainer.evaluate({"a": trainer.eval_dataset, "b": trainer.eval_dataset})
    assert metrics["eval_a_loss"] == metrics["eval_b_loss"]


def test_predict_returns_rows_in_order(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=11)
    output = trainer.predict(trainer.eval_dataset)
    assert output.predictions.shape == (11, 3)
    assert output.label_ids.tolist() == trainer.eval_dataset.y.tolist()
    assert "test_loss" in output.metrics


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, y):
        out = self.layer(x)
        return nn.functional.mse_loss(out, y), out


def test_batches_of_tuples_train_and_evaluate(tmp_path, repository):
    data = TensorDataset(torch.randn(10, 2), torch.randn(10, 1))
    args = TrainingArguments(str(tmp_path), max_steps=3, disable_tqdm=True)
    trainer = Trainer(Tuples(), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.predict(data).predictions.shape == (10, 1)
    assert trainer.evaluate()["eval_loss"] > 0


def test_rows_of_different_length_are_padded_with_the_index_that_losses_ignore():
    tally = EvalAccumulator(EvalShard(3, 2, World()), keep_outputs=True)
    tally.add(None, {"a": torch.ones(2, 2)}, torch.ones(2, 2))
    tally.add(None, {"a": torch.ones(1, 3)}, torch.ones(1, 3))
    predictions, labels, _ = tally.outputs()
    assert predictions["a"][:, 2].tolist() == [-100, -100, 1]
    assert labels.shape == (3, 3)
    assert tally.mean_loss() is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("samples", [1, 5, 12])
def test_shares_cover_a_dataset_once(ranks, samples):
    share = EvalShard(samples, 2, World(0, ranks))
    rows = [index for rank in range(ranks) for batch in share.of(rank) for index in batch]
    assert sorted(rows) == list(range(samples))
    for rank in range(ranks):
        mine = EvalShard(samples, 2, World(rank, ranks))
        assert mine.local_batches(), "every rank runs a batch, so that all know the shapes"
        assert mine.is_stand_in == (rank >= math.ceil(samples / 2))


def test_outputs_without_the_loss():
    one = torch.ones(2)
    assert split_outputs({"loss": 1, "logits": one}) is one
    assert split_outputs({"loss": 1, "logits": one, "other": 2}, ["other"]) is one
    assert split_outputs((1, one, one)) == (one, one)
    assert split_outputs(torch.tensor(1.0)) is None
    assert find_labels({"x": 1}) is None
    assert find_labels((1, 2)) == 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


class NoLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, y):
        return {"logits": self.layer(x)}


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        (Tuples(), Stream(), "set `max_steps`"),
        (Tuples(), None, "has no train_dataset"),
        (Tuples(), TensorDataset(torch.ones(0, 2)), "is empty"),
        (NoLoss(), TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), "no scalar loss"),
    ],
)
def test_what_cannot_be_trained_is_said_clearly(tmp_path, repository, model, data, said):
    args = TrainingArguments(str(tmp_path), disable_tqdm=True)
    with pytest.raises(ConfigError, match=said):
        Trainer(model, args, train_dataset=data).train()


def test_a_missing_dataset_for_evaluation_is_said_before_the_first_step(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_strategy="steps")
    with pytest.raises(ConfigError, match="no eval_dataset"):
        trainer.train()
    assert trainer.state.global_step == 0


def draws(_):
    draw = torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002, TID251
    return {"drawn": float(draw)}


def test_an_evaluation_that_draws_changes_nothing_of_what_is_trained_after_it(tmp_path):
    alone = make_trainer(tmp_path / "alone", eval_size=8, max_steps=9)
    alone.train()
    beside = make_trainer(
        tmp_path / "beside", eval_size=8, max_steps=9, eval_strategy="steps", eval_steps=2
    )
    beside.compute_metrics = draws
    beside.train()
    assert equal(alone.model.state_dict(), beside.model.state_dict())


def test_in_a_run_that_began_elsewhere_an_evaluation_leaves_its_draws(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=8)
    trainer.compute_metrics = draws
    before = torch.get_rng_state()
    trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before)
    trainer.train_sampler = SimpleNamespace(cursor=SimpleNamespace(origin={"step": 1}))
    trainer.evaluate()
    assert not torch.equal(torch.get_rng_state(), before)
