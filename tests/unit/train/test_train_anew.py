"""A second training of one trainer, and epochs that a callback cuts short."""

from __future__ import annotations

import pytest
import torch

from resilient import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from tests.unit.train.fakes import equal
from tests.unit.train.models import Net, Noisy, make_trainer

OPTIONS = {"max_steps": 4, "logging_steps": 1, "save_steps": 2}


def rates(trainer):
    return [one["learning_rate"] for one in trainer.state.log_history if "loss" in one]


def weights(trainer):
    return {name: one.clone() for name, one in trainer.model.state_dict().items()}


def test_train_false_again_begins_anew(tmp_path):
    made = []

    def make_model():
        made.append(1)
        return Net()

    args = TrainingArguments(str(tmp_path), disable_tqdm=True, learning_rate=0.1, **OPTIONS)
    trainer = Trainer(args=args, train_dataset=Noisy(20), model_init=make_model)
    trainer.train(resume_from_checkpoint=False)
    first = (rates(trainer), weights(trainer), trainer.state.log_history)
    trainer.train(resume_from_checkpoint=False)
    assert equal((rates(trainer), weights(trainer), trainer.state.log_history), first)
    assert len(made) == 2
    assert first[0][0] == 0.1


@pytest.mark.parametrize("gives_schedule", [False, True])
def test_train_false_again_rewinds_given_optimizer(tmp_path, repository, gives_schedule):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if gives_schedule else None
    args = TrainingArguments(str(tmp_path), disable_tqdm=True, **OPTIONS)
    trainer = Trainer(model, args, train_dataset=Noisy(20), optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=False)
    first = rates(trainer)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.optimizer is optimizer
    assert rates(trainer) == first
    assert first[0] == 0.1 > first[1]


def test_train_false_again_keeps_loaded_weights(tmp_path):
    other = make_trainer(tmp_path / "other", **OPTIONS)
    other.train()
    args = TrainingArguments(
        str(tmp_path / "own"), disable_tqdm=True, **{**OPTIONS, "learning_rate": 0.0}
    )
    trainer = Trainer(args=args, train_dataset=Noisy(20), model_init=Net)
    trainer.train()
    trainer.load_model(str(tmp_path / "other"))
    trainer.train(resume_from_checkpoint=False)
    name = "layers.0.weight"
    assert torch.equal(trainer.model.state_dict()[name], other.model.state_dict()[name])


def test_early_stopping_counts_from_zero_in_second_training(tmp_path, repository):
    stopping = EarlyStoppingCallback(3)
    how = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    trainer = make_trainer(
        tmp_path, callbacks=[stopping], eval_size=4, learning_rate=0.0, **OPTIONS, **how
    )
    trainer.train(resume_from_checkpoint=False)
    steps = trainer.state.global_step
    stopping.early_stopping_patience_counter = 2
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == steps


class CutEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            control.should_epoch_stop = True


class Dies(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyError("dies")


def cut_run(folder, *callbacks, **options):
    how = {"num_train_epochs": 2, "save_steps": 1, "logging_steps": 1, **options}
    trainer = make_trainer(folder, size=20, callbacks=[CutEpoch(), *callbacks], **how)
    trainer.train()
    return trainer


@pytest.mark.parametrize("options", [{}, {"max_steps": 10}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("step", [3, 5])
def test_cut_epoch_interrupted_run_equals_unbroken(tmp_path, step, options):
    unbroken = cut_run(tmp_path / "unbroken", **options)
    with pytest.raises(KeyError):
        cut_run(tmp_path / "run", Dies(step), **options)
    resumed = cut_run(tmp_path / "run", **options)
    accumulation = options.get("gradient_accumulation_steps", 1)
    assert unbroken.state.global_step == (8 if accumulation == 1 else 6)
    assert unbroken.state.max_steps == (10 if accumulation == 1 else 6)
    assert unbroken.state.epoch == 2.0
    assert equal(weights(resumed), weights(unbroken))
    assert resumed.state.state_dict()["log_history"] == unbroken.state.state_dict()["log_history"]
    assert resumed.state.max_steps == unbroken.state.max_steps


def test_cut_epoch_extended_run_trains_the_new_epoch(tmp_path):
    assert cut_run(tmp_path).state.global_step == 8
    longer = cut_run(tmp_path, num_train_epochs=3)
    assert longer.state.global_step == 13
    assert longer.state.epoch == 3.0
