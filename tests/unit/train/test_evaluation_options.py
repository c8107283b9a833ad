"""What arguments and overrides change in an evaluation; several ranks are tested as processes."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from resilient import EvalPrediction, Trainer, TrainerCallback, TrainingArguments
from resilient.errors import ConfigError
from resilient.train.model.batch import find_labels, ignored_outputs, label_names_of, main_input
from tests.unit.train.models import DieAfter, Dies, Net, Noisy, make_trainer


def steps_of(trainer, name="eval_loss"):
    return [entry["step"] for entry in trainer.state.log_history if name in entry]


def test_evaluation_before_the_first_step_is_not_made_again_by_a_life_that_resumes(
    tmp_path, repository
):
    options = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 4, "max_steps": 8}
    with pytest.raises(Dies):
        make_trainer(tmp_path, eval_size=5, callbacks=[DieAfter(5)], **options).train()
    trainer = make_trainer(tmp_path, eval_size=5, **options)
    trainer.train()
    assert steps_of(trainer) == [0, 4, 8]


@pytest.mark.parametrize(
    ("strategy", "delay", "steps"),
    [("steps", 5, [6, 8]), ("steps", 8, [8]), ("epoch", 2, [26]), ("epoch", 1.5, [26])],
)
def test_no_evaluation_falls_into_the_delay(tmp_path, repository, strategy, delay, steps):
    length = {"max_steps": 8} if strategy == "steps" else {}
    trainer = make_trainer(
        tmp_path, eval_size=5, eval_strategy=strategy, eval_steps=2, eval_delay=delay, **length
    )
    trainer.train()
    assert steps_of(trainer) == steps


def test_only_the_loss_is_computed_when_only_the_loss_is_wanted(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=5, prediction_loss_only=True)
    trainer.compute_metrics = lambda _: pytest.fail("there is nothing to compute it from")
    assert "eval_loss" in trainer.evaluate()
    output = trainer.predict(trainer.eval_dataset)
    assert output.predictions is None
    assert output.label_ids is None
    assert "test_loss" in output.metrics


class Judged(Trainer):
    """Overrides the step by either of its names, with as many arguments as it likes."""

    def evaluation_step(self, model, inputs):
        loss, _, labels = super().evaluation_step(model, inputs)
        return loss, labels * 10, labels


class OnlyLoss(Trainer):
    def evaluation_step(self, model, inputs):
        return torch.tensor(7.0)


class Predicts(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, _, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, labels * 10, labels


@pytest.mark.parametrize("kind", [Judged, Predicts])
def test_the_step_of_evaluation_is_overridden_by_either_of_its_names(tmp_path, repository, kind):
    trainer = make_trainer(tmp_path, eval_size=5, kind=kind)
    output = trainer.predict(trainer.eval_dataset)
    assert output.predictions.tolist() == (trainer.eval_dataset.y * 10).tolist()


def test_a_step_of_evaluation_may_return_nothing_but_a_loss(tmp_path, repository):
    assert make_trainer(tmp_path, eval_size=5, kind=OnlyLoss).evaluate()["eval_loss"] == 7


class Predicted(TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_predict(self, args, state, control, /, *, metrics, **_):
        self.heard.append(sorted(metrics))


def test_a_prediction_is_told_with_its_metrics(tmp_path, repository):
    callback = Predicted()
    trainer = make_trainer(tmp_path, eval_size=5, callbacks=[callback])
    trainer.compute_metrics = lambda prediction: {"rows": len(prediction.label_ids)}
    trainer.predict(trainer.eval_dataset, metric_key_prefix="p")
    speeds = ["p_runtime", "p_samples_per_second", "p_steps_per_second"]
    assert callback.heard == [["p_loss", "p_rows", *speeds]]


class Two(nn.Module):
    """Returns a number beside its rows, and takes two labels."""

    config = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, first_label, second_label=None):
        scores = self.layer(x)
        loss = nn.functional.cross_entropy(scores, first_label)
        return {"loss": loss, "scores": scores, "balance": scores.mean()}


class TwoLabels(Noisy):
    def __getitem__(self, index):
        one = super().__getitem__(index)
        return {"x": one["x"], "first_label": one["label"], "second_label": index}


def two(tmp_path, **options):
    data = TwoLabels(10, augment=False)
    args = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        disable_tqdm=True,
        **options,
    )
    seen = []

    def compute(prediction):
        seen.append(prediction)
        return {"mean": float(prediction.predictions.mean())}

    return Trainer(
        Two(), args, train_dataset=data, eval_dataset=data, compute_metrics=compute
    ), seen


def test_outputs_that_training_ignores_are_ignored_in_every_evaluation(tmp_path, repository):
    trainer, seen = two(tmp_path)
    trainer.train(ignore_keys_for_eval=["balance"])
    assert [one.predictions.shape for one in seen] == [(10, 3), (10, 3)]
    assert [len(one.label_ids) for one in seen] == [2, 2]
    assert steps_of(trainer, "eval_mean") == [1, 2]


def test_a_number_among_the_outputs_is_refused_with_what_to_do(tmp_path, repository):
    trainer, _ = two(tmp_path)
    with pytest.raises(ConfigError, match="ignore_keys"):
        trainer.evaluate()


def test_labels_are_what_they_are_told_to_be(tmp_path, repository):
    trainer, seen = two(tmp_path, label_names=["second_label"])
    trainer.evaluate(ignore_keys=["balance"])
    assert seen[0].label_ids.tolist() == list(range(10))


def test_predictions_are_reduced_batch_by_batch(tmp_path, repository):
    trainer, seen = two(tmp_path)
    trainer.preprocess_logits_for_metrics = lambda scores, labels: scores.argmax(-1)
    trainer.evaluate(ignore_keys=["balance"])
    assert seen[0].predictions.shape == (10,)


class Answers(nn.Module):
    def forward(self, x, start_positions=None, return_loss=True):
        return x


class ForQuestionAnswering(Answers):
    pass


def test_labels_are_found_by_the_names_that_forward_gives_them():
    assert label_names_of(Net()) == ("labels",)
    assert label_names_of(Two()) == ("first_label", "second_label")
    assert label_names_of(Answers()) == ("labels",)
    assert label_names_of(ForQuestionAnswering()) == ("start_positions",)
    both = {"a_label": 1, "b_label": 2}
    assert find_labels(both, ("a_label", "b_label")) == (1, 2)
    assert find_labels(both, ("a_label", "c_label")) == 1
    assert find_labels(both, ("a_label", "c_label"), finds_all=True) is None
    assert find_labels(both, ()) is None


def test_the_main_input_is_the_one_that_the_model_names():
    assert main_input({"labels": 1, "input_ids": 2}, Net()) == 2
    assert main_input({"x": 1, "labels": 2}, Net()) == 1
    assert main_input((3, 4), Net()) == 3


def test_outputs_that_a_config_calls_no_predictions_are_ignored():
    model = Net()
    assert ignored_outputs(model) == ("past_key_values",)
    model.config = type("Config", (), {"keys_to_ignore_at_inference": ["memory"]})()
    assert ignored_outputs(model) == ["memory"]


class MakesLoss(nn.Module):
    """As CLIP: what belongs together is known without labels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, return_loss=True):
        return {"loss": (self.layer(x) - x).square().mean(), "rows": self.layer(x)}


def test_a_model_that_makes_a_loss_without_labels_is_evaluated_by_it(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=5)
    trainer.model = MakesLoss()
    trainer.__dict__.pop("label_names", None)
    data = [{"x": torch.ones(6) * one} for one in range(5)]
    assert trainer.evaluate(data)["eval_loss"] > 0


def test_what_metrics_get_unpacks_into_what_is_there():
    assert tuple(EvalPrediction(1, 2)) == (1, 2)
    assert tuple(EvalPrediction(1, 2, None, 4)) == (1, 2, 4)
    assert EvalPrediction(1, 2, 3)[2] == 3
    with pytest.raises(IndexError):
        EvalPrediction(1, 2)[2]


def test_one_of_several_datasets_is_evaluated_by_its_name(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=5)
    trainer.eval_dataset = {"a": trainer.eval_dataset, "b": Noisy(3, augment=False)}
    assert trainer.evaluate("b")["eval_loss"] == trainer.evaluate()["eval_b_loss"]
    assert not {"eval_a_loss", "eval_b_loss"} & set(trainer.evaluate("b"))


def test_metrics_are_shown_and_written(tmp_path, repository, capsys):
    trainer = make_trainer(tmp_path / "out", eval_size=5)
    trainer.log_metrics("eval", {"eval_loss": 1.23456, "eval_runtime": 62.5, "eval_n": 7})
    assert capsys.readouterr().out.splitlines() == [
        "***** eval metrics *****",
        "  eval_loss    =         1.2346",
        "  eval_n       =              7",
        "  eval_runtime = 0:01:02.500000",
    ]
    trainer.save_metrics("eval", {"eval_loss": 1.5})
    trainer.save_metrics("test", {"test_loss": 2.5})
    trainer.save_metrics("train", {"train_loss": 3.5}, combined=False)
    trainer.save_state()
    found = {one.name: json.loads(one.read_text()) for one in (tmp_path / "out").glob("*.json")}
    assert found.pop("trainer_state.json")["global_step"] == 0
    assert found == {
        "all_results.json": {"eval_loss": 1.5, "test_loss": 2.5},
        "eval_results.json": {"eval_loss": 1.5},
        "test_results.json": {"test_loss": 2.5},
        "train_results.json": {"train_loss": 3.5},
    }


def test_a_step_that_is_asked_for_the_loss_alone_returns_nothing_else(tmp_path, repository):
    trainer = make_trainer(tmp_path, eval_size=4)
    batch = next(iter(trainer.get_eval_dataloader()))
    loss, *nothing = trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
    assert loss.dim() == 0
    assert nothing == [None, None]
    again, *both = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)
    assert [len(one) for one in both] == [4, 4]
    assert again.dim() == 0
