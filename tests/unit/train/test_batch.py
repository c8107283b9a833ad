from __future__ import annotations

import dataclasses

import pytest
import torch

from resilient.errors import ConfigError
from resilient.train.trainer import Trainer
from tests.unit.train.models import Net, make_trainer


class WithIndex(torch.utils.data.Dataset):
    """Samples with a column that no model takes."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {**self.data[index], "index": index}


def with_columns(folder, kind=Trainer, **options):
    trainer = make_trainer(folder, max_steps=2, eval_size=6, kind=kind, **options)
    trainer.train_dataset = WithIndex(trainer.train_dataset)
    trainer.eval_dataset = WithIndex(trainer.eval_dataset)
    return trainer


def test_columns_that_forward_does_not_take_are_dropped_and_told_once(tmp_path, repository, capsys):
    trainer = with_columns(tmp_path)
    trainer.train()
    assert "eval_loss" in trainer.evaluate()
    said = capsys.readouterr().err
    assert said.count("its forward does not accept them: index") == 1


def test_training_step_sees_all_columns(tmp_path, repository):
    seen = []

    class Sees(Trainer):
        def training_step(self, model, inputs):
            seen.extend(inputs["index"].tolist())
            return super().training_step(model, inputs)

    with_columns(tmp_path, Sees).train()
    assert len(seen) == 8


def test_a_forward_with_kwargs_takes_all(tmp_path, repository):
    trainer = with_columns(tmp_path)
    taken, forward = set(), trainer.model.forward

    def greedy(x, labels=None, **others):
        taken.update(others)
        return forward(x, labels)

    trainer.model.forward = greedy
    trainer.train()
    assert taken == {"index"}


def test_false_gives_the_model_everything(tmp_path, repository):
    with pytest.raises(TypeError, match="index"):
        with_columns(tmp_path, remove_unused_columns=False).train()


def test_a_scheduler_that_follows_a_metric_is_refused_at_the_start_without_evaluations(
    tmp_path, repository
):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    trainer = make_trainer(tmp_path)
    trainer.optimizer, trainer.lr_scheduler = optimizer, plateau
    with pytest.raises(ConfigError, match="`ReduceLROnPlateau` follows a metric of evaluations"):
        trainer.train()
    assert repository.lives == 0


@pytest.mark.parametrize(
    ("config", "ahead"),
    [(None, True), ({"non_blocking": None}, True), ({"non_blocking": False}, False)],
)
def test_batches_are_copied_ahead_unless_that_is_not_wanted(tmp_path, repository, config, ahead):
    asked = []

    class Tells(torch.Tensor):
        def to(self, device, *, non_blocking=False):
            asked.append((device.type, non_blocking))
            return self

    trainer = make_trainer(tmp_path, accelerator_config=config)
    # It stands in for a GPU.
    trainer.session = dataclasses.replace(trainer.session, device=torch.device("meta"))
    trainer._prepare_inputs({"x": torch.zeros(1).as_subclass(Tells), "more": [1]})
    assert asked == [("meta", ahead)]
