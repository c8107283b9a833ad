from __future__ import annotations

import itertools

import pytest

from resilient.errors import ConfigError
from resilient.train.callbacks.base import (
    EVENTS,
    CallbackHandler,
    EarlyStoppingCallback,
    TrainerCallback,
)
from resilient.train.state import TrainerControl, TrainerState
from tests.unit.train.models import DieAfter, Dies, make_trainer


def listener(heard):
    """Make a callback that listens to everything."""

    def hear(event):
        def method(self, args, state, control, /, **kwargs):
            heard.append((event, state.global_step))

        return method

    return type("Listener", (TrainerCallback,), {event: hear(event) for event in EVENTS})()


def test_events_come_in_the_order_of_the_field(tmp_path, repository):
    heard = []
    make_trainer(
        tmp_path,
        callbacks=[listener(heard)],
        size=12,
        eval_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        save_steps=2,
        eval_strategy="steps",
        num_train_epochs=1,
    ).train()
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"]
    short = ["on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"]
    assert [event for event, _ in heard] == [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        *step,
        "on_step_end",
        *short,
        "on_step_end",
        "on_log",
        "on_prediction_step",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_epoch_end",
        "on_log",
        "on_train_end",
    ]


def test_only_overridden_events_are_called():
    class One(TrainerCallback):
        def on_save(self, args, state, control, /, **kwargs):
            control.should_log = True

    handler = CallbackHandler([One], None, TrainerState(), TrainerControl())
    assert [name for name, listeners in handler._listeners.items() if listeners] == ["on_save"]
    handler.fire("on_save")
    assert handler.control.should_log


def test_another_control_that_is_returned_counts():
    class Returns(TrainerCallback):
        def on_log(self, args, state, control, /, **kwargs):
            return TrainerControl(should_training_stop=True)

    control = TrainerControl()
    CallbackHandler([Returns()], None, TrainerState(), control).fire("on_log", logs={})
    assert control.should_training_stop


class Counts(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, /, **_):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_two_callbacks_of_one_class_and_a_new_one_survive_a_resume(tmp_path, repository):
    with pytest.raises(Dies):
        make_trainer(tmp_path, callbacks=[Counts(), DieAfter(9)]).train()
    saved = repository.checkpoints[max(repository.checkpoints)]["callbacks"]
    assert saved.keys() == {"TrainerControl", "Counts"}
    first, second = Counts(), Counts()
    with pytest.warns(UserWarning, match="two callbacks of the class `Counts`"):
        make_trainer(tmp_path, callbacks=[first, second]).train()
    assert (first.steps, second.steps) == (26, 26 - 8)
    saved = repository.checkpoints[max(repository.checkpoints)]["callbacks"]
    assert saved.keys() == {"TrainerControl", "Counts", "Counts_2"}


def early(tmp_path, *more, **options):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "eval_size": 8,
        "metric_for_best_model": "loss",
        "learning_rate": 1.0,
        "num_train_epochs": 20,
        **options,
    }
    return make_trainer(tmp_path, callbacks=[EarlyStoppingCallback(3), *more], **options)


def test_early_stopping_counts_through_a_resume(tmp_path, repository):
    straight = early(tmp_path / "a")
    straight.train(resume_from_checkpoint=False)
    end = straight.state.global_step
    assert end < straight.state.max_steps
    repository.checkpoints.clear()
    for step in itertools.chain(range(3, end, 2)):
        with pytest.raises(Dies):
            early(tmp_path / "b", DieAfter(step)).train()
    broken = early(tmp_path / "b")
    broken.train()
    assert broken.state == straight.state


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path, repository):
    first = early(tmp_path)
    first.train()
    again = early(tmp_path)
    output = again.train()
    assert output.global_step == first.state.global_step
    assert output.metrics["train_steps_per_second"] == 0


def test_early_stopping_says_what_it_lacks(tmp_path, repository):
    with pytest.raises(ConfigError, match="metric_for_best_model"):
        make_trainer(tmp_path, callbacks=[EarlyStoppingCallback]).train()
    assert repository.closed == 1


def test_an_epoch_that_is_given_up_is_not_gone_back_to(tmp_path, repository):
    class GiveUp(TrainerCallback):
        def on_step_end(self, args, state, control, /, **_):
            control.should_epoch_stop = state.global_step == 4

    with pytest.raises(Dies):
        make_trainer(tmp_path, callbacks=[GiveUp(), DieAfter(6)]).train()
    assert repository.abouts[max(repository.checkpoints)].data["samples"] == 16
    trainer = make_trainer(tmp_path, max_steps=8)
    trainer.train()
    assert trainer.train_sampler.cursor.epoch == 1
    assert trainer.train_sampler.cursor.samples == 16


@pytest.mark.parametrize(
    ("metrics", "greater", "threshold", "stops_after"),
    [
        ([0.5, 0.6, 0.7, 0.6, 0.5], True, 0.0, 5),
        ([0.5, 0.4, 0.3, 0.4, 0.5], False, 0.0, 5),
        ([0.5, 0.55, 0.58, 0.7], True, 0.1, 3),
        ([0.5, 0.7, 0.9], True, 0.1, None),
    ],
)
def test_patience_ends_where_the_metric_gets_no_better(metrics, greater, threshold, stops_after):
    stopping, state = EarlyStoppingCallback(2, threshold), TrainerState()
    args = type("Args", (), {"metric_for_best_model": "f1", "greater_is_better": greater})
    for number, value in enumerate(metrics, 1):
        control = TrainerControl()
        stopping.on_evaluate(args, state, control, metrics={"eval_f1": value})
        assert control.should_training_stop == (number == stops_after)
        # As the trainer does, which knows no threshold.
        best = state.best_metric
        if best is None or (value > best if greater else value < best):
            state.best_metric = value


def test_a_callback_that_was_removed_hears_no_more():
    heard = []
    one, other = listener(heard), listener(heard)
    handler = CallbackHandler([one], None, TrainerState(), TrainerControl())
    handler.add_callback(other)
    assert handler.pop_callback(one) is one
    assert handler.pop_callback(EarlyStoppingCallback) is None
    handler.fire("on_save")
    assert len(heard) == 1
