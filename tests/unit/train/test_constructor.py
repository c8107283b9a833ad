"""A script's call of the constructor works as it stands: names, order, and values of None."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.errors import ConfigError
from tests.unit.train.models import Net, Noisy, make_trainer

transformers = pytest.importorskip("transformers")


def args_for(folder, **more):
    return TrainingArguments(
        str(folder), max_steps=2, save_strategy="no", disable_tqdm=True, use_cpu=True, **more
    )


class Padder:
    """What a tokenizer is to a trainer."""

    def pad(self, samples, **_):
        return {
            "x": torch.stack([one["x"] for one in samples]),
            "labels": torch.tensor([one["label"] for one in samples]),
        }

    def save_pretrained(self, folder):
        (Path(folder) / "padder.txt").write_text("mine")


class Counting(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, /, **_):
        self.steps += 1


def test_names_order_and_defaults_are_the_fields():
    theirs = inspect.signature(transformers.Trainer.__init__).parameters
    ours = inspect.signature(Trainer.__init__).parameters
    assert [one for one in ours if one != "tokenizer"] == list(theirs)
    assert {name: ours[name].default for name in theirs} == {
        name: one.default for name, one in theirs.items()
    }


def test_all_seven_that_are_named_are_used_by_position_or_by_name(tmp_path):
    counting, seen = Counting(), []

    def measure(prediction):
        seen.append(len(prediction.predictions))
        return {"mine": 1.0}

    args = args_for(tmp_path, eval_strategy="steps", eval_steps=2)
    train, held_out = Noisy(16), Noisy(5, augment=False)
    with pytest.warns(FutureWarning, match="now called `processing_class`") as told:
        named = Trainer(
            model=Net(),
            args=args,
            train_dataset=train,
            eval_dataset=held_out,
            tokenizer=Padder(),
            compute_metrics=measure,
            callbacks=[counting],
        )
    assert told[0].filename == __file__
    named.train()
    by_position = Trainer(
        Net(), args, None, train, held_out, Padder(), None, None, measure, [counting]
    )
    by_position.args.output_dir = str(tmp_path / "second")
    by_position.train(False)
    assert seen == [5, 5]
    assert counting.steps == 4
    for trainer in (named, by_position):
        assert isinstance(trainer.processing_class, Padder)
        assert trainer.state.log_history[-2]["eval_mine"] == 1.0
        trainer.save_model(str(tmp_path / "saved"))
        assert (tmp_path / "saved" / "padder.txt").read_text() == "mine"


def test_the_older_name_is_an_attribute_too(tmp_path):
    trainer = Trainer(Net(), args_for(tmp_path), processing_class=(padder := Padder()))
    with pytest.warns(FutureWarning, match="processing_class") as told:
        assert trainer.tokenizer is padder
    assert told[0].filename == __file__


def test_none_is_nothing(tmp_path):
    trainer = Trainer(
        Net(), args_for(tmp_path), train_dataset=Noisy(16), callbacks=None, compute_metrics=None
    )
    assert trainer.train().global_step == 2


@pytest.mark.parametrize(
    ("model", "says"),
    [(Net, "`model` is a type"), ("gpt2", "`model` is a str"), (lambda: None, "is a function")],
)
def test_what_is_no_model_is_refused(tmp_path, model, says):
    with pytest.raises(ConfigError, match=says):
        Trainer(model, args_for(tmp_path))


def test_arguments_of_another_library_are_refused_with_the_import(tmp_path):
    with pytest.raises(ConfigError, match=r"is a types\.SimpleNamespace, not resilient") as refusal:
        Trainer(Net(), SimpleNamespace(output_dir=str(tmp_path)))
    assert refusal.value.hint == "from resilient import TrainingArguments"


def test_a_trial_is_made_with_what_stood_at_its_position(tmp_path):
    given = (None, args_for(tmp_path), None, Noisy(16), Noisy(5, augment=False), None, Net)
    assert Trainer(*given).made_with["train_dataset"] is given[3]

    class Own(Trainer):
        def __init__(self, folder, **named):
            super().__init__(Net(), args_for(folder), **named)

    assert Own(tmp_path, eval_dataset=given[4]).made_with == {
        "folder": tmp_path,
        "eval_dataset": given[4],
    }
    assert make_trainer(tmp_path).made_with["train_dataset"].augment
