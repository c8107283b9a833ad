"""Settings that guides to training name, as a run of its own each."""

from __future__ import annotations

import pytest
import torch
from fakes import equal
from models import DieAfter, Dies, Net, Noisy, make_trainer

from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.callback import TrainerCallback
from resilient.train.trainer import Trainer


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
