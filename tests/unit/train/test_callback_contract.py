"""What callbacks of other people's making rely on: their state, their arguments, the flags."""

from __future__ import annotations

import pytest

from resilient import EarlyStoppingCallback
from resilient.errors import ConfigError
from resilient.train.callbacks.base import EVENTS, TrainerCallback
from resilient.train.state import TrainerControl
from tests.unit.train.models import DieAfter, Dies, make_trainer

CONTEXT = {
    *("model", "processing_class", "optimizer", "lr_scheduler"),
    *("train_dataloader", "eval_dataloader"),
}
MORE = {"on_log": {"logs"}, "on_evaluate": {"metrics"}, "on_predict": {"metrics"}}


class Listener(TrainerCallback):
    def __init__(self):
        self.heard = {}


def _hear(event):
    def method(self, args, state, control, /, **kwargs):
        self.heard.setdefault(event, []).append(kwargs)

    return method


for _event in EVENTS:
    setattr(Listener, _event, _hear(_event))


def test_every_event_has_the_documented_arguments(tmp_path, repository):
    listener = Listener()
    trainer = make_trainer(
        tmp_path,
        callbacks=[listener],
        eval_size=4,
        max_steps=2,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.evaluate()
    for name in ("on_init_end", "on_prediction_step", "on_evaluate", "on_log"):
        before = listener.heard[name][0]
        assert [before[one] for one in ("optimizer", "lr_scheduler", "train_dataloader")] == [
            *[None] * 3
        ]
    trainer.train()
    trainer.predict(trainer.eval_dataset)
    trainer.callback_handler.fire("on_push_begin")  # as a push to the Hub does
    assert set(listener.heard) == set(EVENTS)
    for name, told in listener.heard.items():
        for kwargs in told:
            assert CONTEXT | MORE.get(name, set()) <= set(kwargs)
    for name in ("on_prediction_step", "on_evaluate", "on_predict"):
        assert len(list(listener.heard[name][-1]["eval_dataloader"])) == 1
    ended = listener.heard["on_train_end"][0]
    assert ended["optimizer"] is trainer.optimizer
    assert ended["train_dataloader"] is not None


@pytest.mark.parametrize("looks", [False, True])
def test_a_callback_that_changes_its_logs_changes_no_history(tmp_path, repository, capsys, looks):
    class Pops(TrainerCallback):
        def on_log(self, args, state, control, /, **kwargs):
            # Who has looked at the list has made it the history.
            assert not looks or state.log_history[-1] == kwargs["logs"]
            kwargs["logs"].clear()

    trainer = make_trainer(tmp_path, callbacks=[Pops], max_steps=3)
    trainer.train()
    assert "grad_norm" in trainer.state.log_history[0]
    assert "grad_norm" in capsys.readouterr().err


def test_an_overridden_log_of_the_field_is_called(tmp_path, repository):
    said = []

    class Own(type(make_trainer(tmp_path))):
        def log(self, logs, start_time=None):
            said.append(dict(logs))
            super().log({**logs, "mine": 1}, start_time)

    trainer = make_trainer(tmp_path, kind=Own, max_steps=3)
    trainer.train()
    assert all("mine" in one for one in trainer.state.log_history)
    assert len(said) == len(trainer.state.log_history) == 2


def test_flags_are_cleared_and_exported_as_the_field_does():
    control = TrainerControl(*[True] * 5)
    control._new_step()
    control._new_epoch()
    assert control == TrainerControl(should_training_stop=True)
    assert control.state() == {
        "args": {
            "should_training_stop": True,
            "should_epoch_stop": False,
            "should_save": False,
            "should_evaluate": False,
            "should_log": False,
        },
        "attributes": {},
    }
    assert TrainerControl.from_state(control.state()) == control
    control._new_training()
    assert control == TrainerControl()


def test_flags_are_exported_as_transformers_does():
    theirs = pytest.importorskip("transformers").TrainerControl(should_save=True)
    assert TrainerControl.from_state(theirs.state()).state() == theirs.state()


def lives(folder, callback, deaths):
    """Train with Transformers' early stopping through deaths; return the last trainer."""
    for death in [*deaths, None]:
        trainer = make_trainer(
            folder,
            callbacks=[callback(), *([DieAfter(death)] if death else [])],
            eval_size=8,
            max_steps=40,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            metric_for_best_model="loss",
            load_best_model_at_end=True,
        )
        if death:
            with pytest.raises(Dies):
                trainer.train()
        else:
            trainer.train()
    return trainer


def test_early_stopping_of_transformers_ends_where_an_unbroken_run_does(tmp_path):
    theirs = pytest.importorskip("transformers").EarlyStoppingCallback

    def stopping():
        # Nothing gets better by that much.
        return theirs(4, early_stopping_threshold=1000.0)

    assert lives(tmp_path / "one", stopping, []).state.global_step == 10
    broken = lives(tmp_path / "two", stopping, [5, 9])
    assert broken.state.global_step == 10
    shown = broken.state.stateful_callbacks["EarlyStoppingCallback"]
    assert shown["args"]["early_stopping_patience"] == 4
    assert shown["attributes"] == {"early_stopping_patience_counter": 4}


def test_callbacks_that_would_hear_nothing_are_refused(tmp_path):
    class Duck:
        def on_step_end(self, args, state, control, /, **_):
            pass

    make_trainer(tmp_path, callbacks=[Duck, TrainerCallback()])
    trainer = make_trainer(tmp_path, callbacks=None)
    for wrong in (object(), object):
        with pytest.raises(ConfigError, match=r"`object`, .* derive it from TrainerCallback"):
            make_trainer(tmp_path, callbacks=[wrong])
        with pytest.raises(ConfigError, match="holds a `object`"):
            trainer.add_callback(wrong)
    with pytest.raises(ConfigError, match=r"of type `Duck`: write callbacks=\[...\]"):
        make_trainer(tmp_path, callbacks=Duck())


STOPPING = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}


def test_resume_names_callback_that_is_gone(tmp_path, capfd):
    options = {**STOPPING, "eval_size": 4, "save_steps": 1}
    make_trainer(tmp_path, callbacks=[EarlyStoppingCallback(5)], max_steps=2, **options).train()
    assert "does not have" not in capfd.readouterr().err
    make_trainer(tmp_path, max_steps=4, **options).train()
    assert "this run does not have: EarlyStoppingCallback" in capfd.readouterr().err


def test_early_stopping_state_is_that_of_transformers():
    from transformers import EarlyStoppingCallback as Theirs

    ours, theirs = EarlyStoppingCallback(3, 0.5), Theirs(3, 0.5)
    ours.early_stopping_patience_counter = theirs.early_stopping_patience_counter = 2
    assert ours.state() == theirs.state()
    assert EarlyStoppingCallback.from_state(theirs.state()).state() == theirs.state()
