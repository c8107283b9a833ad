"""Settings that guides to training name, as a run of its own each."""

from __future__ import annotations

import os

import pytest
import torch

from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trainer import Trainer
from tests.unit.train.fakes import equal
from tests.unit.train.models import DieAfter, Dies, Net, Noisy, make_trainer


class Steps(TrainerCallback):
    """Notes the steps of the events that are asked for."""

    def __init__(self, *events):
        self.heard = {event: [] for event in events}
        for event in events:
            setattr(self, event, self._hear(event))

    def _hear(self, event):
        return lambda _args, state, _control, **_: self.heard[event].append(state.global_step)


def test_arguments_model_optimizer_schedule_and_callbacks_come_one_after_the_other(tmp_path):
    made = []

    def model_init():
        made.append("model")
        return Net()

    class Tells(Trainer):
        def create_optimizer(self, *args, **kwargs):
            made.append("optimizer")
            return super().create_optimizer(*args, **kwargs)

        def create_scheduler(self, *args, **kwargs):
            made.append("schedule")
            return super().create_scheduler(*args, **kwargs)

    class Hears(TrainerCallback):
        def on_init_end(self, args, state, control, /, **_):
            made.append("on_init_end")

        def on_train_begin(self, args, state, control, /, **_):
            made.append("on_train_begin")

    args = TrainingArguments(str(tmp_path), max_steps=1, disable_tqdm=True)
    Tells(args=args, model_init=model_init, train_dataset=Noisy(8), callbacks=[Hears()]).train()
    assert made == ["model", "on_init_end", "optimizer", "schedule", "on_train_begin"]


def test_the_console_shows_what_is_logged_and_nothing_below_its_level(tmp_path, capfd):
    make_trainer(tmp_path / "told", max_steps=2, logging_steps=1, log_level="info").train()
    told = capfd.readouterr()
    lines = [line for line in told.err.splitlines() if "  loss " in line]
    assert len(lines) == 2
    assert all("learning_rate" in line and "epoch" in line for line in lines)
    make_trainer(tmp_path / "quiet", max_steps=2, logging_steps=1, log_level="error").train()
    assert not capfd.readouterr().err


def test_a_run_that_logs_each_step_and_evaluates_and_saves_often_goes_on_as_it_was(tmp_path):
    options = {
        "logging_steps": 1,
        "save_steps": 100,
        "eval_strategy": "steps",
        "eval_steps": 50,
        "max_steps": 200,
        "eval_size": 8,
    }
    steps = Steps("on_log", "on_save", "on_evaluate")
    whole = make_trainer(tmp_path / "whole", callbacks=[steps], **options)
    whole.train()
    assert sorted(set(steps.heard["on_log"])) == list(range(1, 201))
    assert steps.heard["on_save"] == [100, 200]
    assert steps.heard["on_evaluate"] == [50, 100, 150, 200]
    with pytest.raises(Dies):
        make_trainer(tmp_path / "broken", callbacks=[DieAfter(130)], **options).train()
    again = Steps("on_evaluate")
    broken = make_trainer(tmp_path / "broken", callbacks=[again], **options)
    broken.train()
    assert again.heard["on_evaluate"] == [150, 200]
    assert equal(whole.model.state_dict(), broken.model.state_dict())
    assert [one for one in whole.state.log_history if "loss" in one] == [
        one for one in broken.state.log_history if "loss" in one
    ]


def test_the_settings_against_communication_send_once_in_four_batches(tmp_path):
    steps = Steps("on_substep_end", "on_optimizer_step", "on_log", "on_save")
    trainer = make_trainer(
        tmp_path,
        callbacks=[steps],
        size=64,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=8,
        fp16=True,
        logging_steps=100,
        save_steps=1000,
        max_steps=101,
        num_train_epochs=1,
    )
    seen = []
    forward = trainer.model.forward

    def watched(x, labels=None):
        seen.append((len(x), torch.is_autocast_enabled("cpu")))
        return forward(x, labels)

    trainer.model.forward = watched
    trainer.train()
    assert set(seen) == {(8, True)}
    assert len(seen) == 4 * len(steps.heard["on_optimizer_step"]) == 404
    assert len(steps.heard["on_substep_end"]) == 303
    assert steps.heard["on_log"][0] == 100
    # None of them is a thousandth; the last is saved.
    assert steps.heard["on_save"] == [101]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"eval_strategy": "no"}, []),
        ({"eval_strategy": "steps", "eval_steps": 5}, [5, 10, 13]),
        ({"eval_strategy": "epoch"}, [13]),
    ],
)
def test_evaluations_fall_where_the_strategy_says(tmp_path, repository, options, steps):
    hears = Steps("on_evaluate")
    make_trainer(tmp_path, callbacks=[hears], eval_size=4, num_train_epochs=1, **options).train()
    assert hears.heard["on_evaluate"] == steps


def test_the_training_loss_is_the_mean_over_all_steps(tmp_path, repository):
    trainer = make_trainer(tmp_path, logging_steps=1, max_steps=9)
    output = trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(set(losses)) == 9
    assert output.training_loss == pytest.approx(sum(losses) / 9, abs=1e-12)
    assert output.metrics["train_loss"] == output.training_loss


def test_a_state_says_how_long_and_by_how_many_samples_it_trains(tmp_path, repository):
    trainer = make_trainer(tmp_path, num_train_epochs=1.5, gradient_accumulation_steps=2)
    trainer.train()
    state = trainer.state
    assert (state.max_steps, state.num_train_epochs, state.train_batch_size) == (11, 2, 4)
    assert (state.logging_steps, state.save_steps) == (3, 4)


class Where(Noisy):
    """Samples that say in which process each was fetched."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "worker": os.getpid()}


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 0),
        ({"dataloader_num_workers": 2}, 4),
        ({"dataloader_num_workers": 2, "dataloader_persistent_workers": True}, 2),
    ],
)
def test_samples_are_fetched_in_the_processes_that_are_asked_for(
    tmp_path, repository, options, count
):
    seen = set()

    class Looks(Trainer):
        def _prepare_inputs(self, inputs):
            seen.update(inputs.pop("worker").tolist())
            return super()._prepare_inputs(inputs)

    options = {
        "num_train_epochs": 2,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        **options,
    }
    args = TrainingArguments(str(tmp_path), **options)
    Looks(Net(), args, train_dataset=Where(24)).train()
    assert len(seen - {os.getpid()}) == count
    assert (os.getpid() in seen) == (count == 0)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adamw_torch", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-5, "fused": None}),
        ("adamw_torch_fused", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-5, "fused": True}),
        ("sgd", torch.optim.SGD, {"momentum": 0}),
    ],
)
def test_an_optimizer_of_torch_is_the_one_that_is_named(tmp_path, name, kind, options):
    args = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5, "weight_decay": 0.1}
    made = make_trainer(tmp_path, optim=name, **args).create_optimizer()
    assert type(made) is kind
    for group, decay in zip(made.param_groups, (0.1, 0.0), strict=True):
        told = {"lr": 0.05, "weight_decay": decay, **options}
        assert {one: group[one] or None for one in told} == {one: told[one] or None for one in told}
