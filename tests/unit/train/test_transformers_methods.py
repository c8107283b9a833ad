"""Methods of Transformers' Trainer that scripts override or call do what they do there."""

from __future__ import annotations

import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from resilient import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    trainer_utils,
)
from resilient.errors import ConfigError
from resilient.train.evaluation.loop import EvalLoopOutput
from tests.unit.train.models import Net, Noisy, make_trainer


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def evaluator(folder, kind=Trainer, **options):
    trainer = make_trainer(folder, kind=kind, eval_size=10, **options)
    trainer.compute_metrics = accuracy
    return trainer


class OwnLoop(Trainer):
    """A loop without the base's, as scripts write it for Transformers."""

    calls = ()

    def evaluation_loop(
        self,
        dataloader,
        description,
        prediction_loss_only=None,
        ignore_keys=None,
        metric_key_prefix="eval",
    ):
        self.calls = [*self.calls, (description, prediction_loss_only, metric_key_prefix)]
        model = self._wrap_model(self.model, training=False).eval()
        rows = 0
        for inputs in dataloader:
            loss, _, labels = self.prediction_step(model, inputs, False, ignore_keys)
            rows += len(labels)
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )
        metrics = {f"{metric_key_prefix}_loss": loss.item(), f"{metric_key_prefix}_rows": rows}
        return EvalLoopOutput(None, None, metrics, rows)


def test_an_own_loop_runs_in_training_evaluation_and_prediction(tmp_path):
    trainer = evaluator(tmp_path, OwnLoop, max_steps=4, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert trainer.calls == [("Evaluation", None, "eval")] * 2
    logged = [entry for entry in trainer.state.log_history if "eval_rows" in entry]
    assert [(entry["step"], entry["eval_rows"]) for entry in logged] == [(2, 10), (4, 10)]
    assert trainer.evaluate()["eval_samples_per_second"] > 0
    output = trainer.predict(Noisy(7))
    assert output.metrics["test_rows"] == 7
    assert trainer.calls[-1] == ("Prediction", None, "test")


class Counted(Trainer):
    """Adds a metric to those of the base."""

    def evaluation_loop(self, *given, **named):
        output = super().evaluation_loop(*given, **named)
        output.metrics[f"{named['metric_key_prefix']}_double"] = 2 * output.num_samples
        return output


def test_a_loop_around_the_base_changes_metrics_alone(tmp_path):
    plain, counted = evaluator(tmp_path / "a"), evaluator(tmp_path / "b", Counted)
    expected, metrics = plain.evaluate(), counted.evaluate()
    assert metrics["eval_double"] == 20
    same = ("eval_loss", "eval_accuracy")
    assert [metrics[name] for name in same] == [expected[name] for name in same]


class Answers(Trainer):
    """Evaluates as the question-answering example of Transformers does."""

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        loader = self.get_eval_dataloader(eval_dataset)
        compute, self.compute_metrics = self.compute_metrics, None
        start = time.time()  # noqa: TID251 - as in the example
        try:
            output = self.evaluation_loop(
                loader,
                description="Evaluation",
                prediction_loss_only=True if compute is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=metric_key_prefix,
            )
        finally:
            self.compute_metrics = compute
        output.metrics.update(
            trainer_utils.speed_metrics(metric_key_prefix, start, num_samples=output.num_samples)
        )
        right = (output.predictions.argmax(-1) == output.label_ids).mean()
        metrics = {f"{metric_key_prefix}_exact": float(right), **output.metrics}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics


def test_an_evaluation_as_in_the_examples_of_transformers_works(tmp_path):
    seen = []

    class Listener(TrainerCallback):
        def on_evaluate(self, args, state, control, /, *, metrics, model, **_):
            seen.append((state.global_step, sorted(metrics), type(model)))
            control.should_training_stop = True

    trainer = evaluator(
        tmp_path, Answers, callbacks=[Listener()], eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.control.should_training_stop
    assert trainer.control.should_evaluate is False
    names = ["eval_exact", "eval_loss", "eval_runtime", "eval_samples_per_second"]
    assert seen == [(2, names, Net)]
    expected = trainer.predict(trainer.eval_dataset).metrics["test_accuracy"]
    assert trainer.evaluate()["eval_exact"] == expected


@pytest.mark.parametrize("name", ["evaluation_loop", "prediction_loop"])
def test_a_loop_that_a_script_calls_gives_outputs_and_samples(tmp_path, name):
    trainer = evaluator(tmp_path)
    loader = trainer.get_eval_dataloader()
    output = getattr(trainer, name)(loader, "Evaluation", metric_key_prefix="mine")
    assert isinstance(output, EvalLoopOutput)
    assert output.num_samples == 10
    assert (output.predictions.shape, output.label_ids.shape) == ((10, 3), (10,))
    assert set(output.metrics) == {"mine_loss", "mine_accuracy"}
    assert getattr(trainer, name)(loader, "x", prediction_loss_only=True).predictions is None
    assert trainer.model.training


def test_training_is_seen_by_callbacks(tmp_path):
    seen = []

    class Listener(TrainerCallback):
        def on_step_end(self, args, state, control, /, **_):
            seen.append(trainer.is_in_train)

    trainer = make_trainer(tmp_path, callbacks=[Listener()], max_steps=1)
    assert trainer.is_in_train is False
    trainer.train()
    assert (seen, trainer.is_in_train) == ([True], False)


def test_attributes_have_the_values_of_transformers(tmp_path):
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=3, neftune_noise_alpha=None)
    assert trainer.get_total_train_batch_size(trainer.args) == 12
    assert (trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()) == (1, 1, 1)
    assert trainer.place_model_on_device is True
    assert not trainer.can_return_loss
    assert not trainer.is_model_parallel
    assert trainer.deepspeed is trainer.neftune_noise_alpha is trainer.hub_model_id is None
    trainer.model.hf_device_map = {"a": 0, "b": 1}
    assert trainer.is_model_parallel
    handler = trainer.callback_handler
    assert handler.model is trainer.model
    handler.optimizer = "mine"
    assert handler.context["optimizer"] == "mine"


def test_arguments_that_place_the_model_themselves_are_heeded(tmp_path):
    class Placing(TrainingArguments):
        place_model_on_device = False

    class Unmovable(Net):
        def to(self, *_given, **_named):
            raise AssertionError("moved")

    args = Placing(str(tmp_path), use_cpu=True)
    assert Trainer(Unmovable(), args).place_model_on_device is False
    with pytest.raises(AssertionError, match="moved"):
        Trainer(Unmovable(), TrainingArguments(str(tmp_path), use_cpu=True))


def test_a_model_is_made_with_the_trial(tmp_path):
    trainer = Trainer(args=TrainingArguments(str(tmp_path), use_cpu=True), model_init=Net)
    assert isinstance(trainer.call_model_init(), Net)
    trainer = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="no `model_init`"):
        trainer.call_model_init()


def test_metrics_are_formatted_by_an_override(tmp_path, capsys):
    class Loud(Trainer):
        def metrics_format(self, metrics):
            return {name: f"{value}!" for name, value in super().metrics_format(metrics).items()}

    trainer = make_trainer(tmp_path, kind=Loud)
    metrics = {"loss": 0.123456, "train_runtime": 61.5, "total_flos": 3 << 30, "steps": 7}
    assert Trainer.metrics_format(trainer, metrics) == {
        "loss": 0.1235,
        "train_runtime": "0:01:01.500000",
        "total_flos": "3GF",
        "steps": 7,
    }
    trainer.log_metrics("train", metrics)
    assert "loss          =         0.1235!" in capsys.readouterr().out


def test_early_stopping_asks_its_own_comparison(tmp_path):
    class Patient(EarlyStoppingCallback):
        def check_metric_value(self, args, state, control, metric_value):
            self.seen = [*getattr(self, "seen", ()), metric_value]

    callback = Patient()
    trainer = evaluator(
        tmp_path,
        callbacks=[callback],
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="accuracy",
    )
    trainer.train()
    assert len(callback.seen) == 2
    assert trainer.state.global_step == 4


TOKEN = "hf_mine"  # noqa: S105 - for a hub of this test


class FakeHub:
    """Records calls, as ``HfApi`` takes them."""

    calls: ClassVar = []

    def create_repo(self, repo_id, *, token, private, exist_ok):
        self.calls.append(("create", repo_id, token, private, exist_ok))
        return SimpleNamespace(repo_id=f"me/{repo_id}")

    def upload_folder(self, **options):
        self.calls.append(("upload", options))
        return "commit"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(FakeHub, "calls", [])
    monkeypatch.setattr(pytest.importorskip("huggingface_hub"), "HfApi", FakeHub)
    return FakeHub.calls


def test_a_push_uploads_model_and_card_without_checkpoints(tmp_path, hub):
    pushes = []

    class Listener(TrainerCallback):
        def on_push_begin(self, args, state, control, /, **_):
            pushes.append(state.global_step)

    trainer = make_trainer(
        tmp_path / "mine", callbacks=[Listener()], max_steps=2, hub_revision="dev", hub_token=TOKEN
    )
    trainer.train()
    trainer.model.model_tags = ["net"]
    assert trainer.push_to_hub("done", private=True, tags="mine", language="en") == "commit"
    assert pushes == [2]
    assert hub[0] == ("create", "mine", TOKEN, True, True)
    options = hub[1][1]
    assert trainer.hub_model_id == options["repo_id"] == "me/mine"
    assert (options["commit_message"], options["token"]) == ("done", TOKEN)
    assert (options["revision"], options["run_as_future"]) == ("dev", False)
    card = (tmp_path / "mine" / "README.md").read_text()
    assert 'language: ["en"]' in card
    assert 'tags: ["mine", "net"' in card
    assert "# mine" in card
    pushed = {
        str(file.relative_to(tmp_path / "mine"))
        for file in (tmp_path / "mine").rglob("*")
        if file.is_file()
    }
    pushed = {
        name for name in pushed if not any(fnmatch(name, x) for x in options["ignore_patterns"])
    }
    assert pushed == {"README.md", "model.safetensors", "training_args.json"}
    assert trainer.push_to_hub(blocking=False, revision="other") == "commit"
    assert hub[-1][1]["run_as_future"] is True
    assert hub[-1][1]["revision"] == "other"
    assert len(hub) == 3


def test_a_repository_is_named_by_its_argument(tmp_path, hub):
    trainer = make_trainer(tmp_path, hub_model_id="org/model", hub_private_repo=True)
    trainer.init_hf_repo(token=TOKEN)
    assert hub == [("create", "org/model", TOKEN, True, True)]
    assert trainer.push_in_progress is None


def test_saving_the_model_pushes_if_the_arguments_say_so(tmp_path, hub):
    trainer = make_trainer(tmp_path, push_to_hub=True, hub_strategy="end")
    trainer.save_model()
    assert [call[0] for call in hub] == ["create", "upload"]
    assert hub[1][1]["commit_message"] == "Model save"
    args = TrainingArguments().set_push_to_hub("me/model", strategy="end")
    assert (args.push_to_hub, args.hub_model_id) == (True, "me/model")
    with pytest.raises(ConfigError, match="`hub_strategy`='every_save'"):
        TrainingArguments().set_push_to_hub("me/model")


def test_a_push_without_the_hub_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="needs the package huggingface_hub") as caught:
        make_trainer(tmp_path).push_to_hub()
    assert caught.value.hint == "pip install huggingface_hub"


def test_the_end_closes_callbacks(tmp_path):
    closed = []

    class Open(TrainerCallback):
        def close(self):
            closed.append(True)

    make_trainer(tmp_path, callbacks=[Open()]).end()
    assert closed == [True]


SETTERS = {
    "set_training": {"learning_rate": 1e-4, "batch_size": 32, "activation_checkpointing": True},
    "set_evaluate": {"strategy": "steps", "steps": 100, "batch_size": 4, "delay": 3},
    "set_testing": {"batch_size": 32, "loss_only": True},
    "set_save": {"strategy": "epoch", "total_limit": 2},
    "set_logging": {"strategy": "epoch", "first_step": True},
    "set_optimizer": {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.2},
    "set_lr_scheduler": {"name": "cosine", "warmup_steps": 0.05, "max_steps": 9},
    "set_dataloader": {"train_batch_size": 16, "num_workers": 2, "sampler_seed": 5},
}


@pytest.mark.parametrize("name", SETTERS)
def test_a_setter_of_arguments_sets_what_transformers_sets(tmp_path, name):
    theirs_kind = pytest.importorskip("transformers").TrainingArguments
    theirs, ours = theirs_kind(str(tmp_path), use_cpu=True), TrainingArguments(str(tmp_path))
    # Our list of trackers is empty where Transformers keeps the text.
    names = [one for one in vars(theirs) if one in vars(ours) and one != "report_to"]
    before = {one: vars(theirs)[one] for one in names}
    getattr(theirs, name)(**SETTERS[name])
    assert getattr(ours, name)(**SETTERS[name]) is ours
    changed = [one for one in names if vars(theirs)[one] != before[one]]
    assert len(changed) >= len(SETTERS[name])
    assert {one: getattr(ours, one) for one in changed} == {
        one: getattr(theirs, one) for one in changed
    }


def test_a_refused_setter_changes_nothing():
    args = TrainingArguments(learning_rate=1.0)
    before = dict(vars(args))
    with pytest.raises(ConfigError, match="`learning_rate`=-1"):
        args.set_training(learning_rate=-1, batch_size=4)
    with pytest.raises(ConfigError, match="`save_on_each_node`"):
        args.set_save(on_each_node=True)
    assert vars(args) == before


def test_small_functions_agree_with_transformers():
    theirs = pytest.importorskip("transformers.trainer_utils")
    values = [
        {"a": np.float32(1.5), "b": [np.int64(2), torch.tensor(3.0)], "c": "x", "d": (True,)},
        {"e": torch.ones(1)},
    ]
    for value in values:
        ours = trainer_utils.denumpify_detensorize(value)
        assert ours == theirs.denumpify_detensorize(value)
        assert type(next(iter(ours.values()))) is float
    for value in ([], {}, "text", iter(()), 3):
        assert trainer_utils.has_length(value) == theirs.has_length(value)
    for function in (accuracy, lambda: 1, lambda a, b: 1):
        assert trainer_utils.number_of_arguments(function) == theirs.number_of_arguments(function)
    for rank in (-1, 0, 1):
        assert trainer_utils.is_main_process(rank) == theirs.is_main_process(rank)
    assert trainer_utils.total_processes_number(-1) == theirs.total_processes_number(-1) == 1
    metrics = {"eval_loss": 1.0, "eval_f1": 0.5, "epoch": 1.0, "eval_runtime": 3.0}
    objective = trainer_utils.default_compute_objective
    assert objective(metrics) == theirs.default_compute_objective(metrics) == 0.5
    names = set(trainer_utils.speed_metrics("x", 0.0, 1, 2, 3))
    assert names == set(theirs.speed_metrics("x", 0.0, 1, 2, 3))


def test_a_seed_draws_what_transformers_draws():
    theirs = pytest.importorskip("transformers")
    draws = []
    for function in (trainer_utils.set_seed, theirs.set_seed):
        function(7)
        draws.append((torch.rand(3).tolist(), np.random.rand(3).tolist()))  # noqa: NPY002
    assert draws[0] == draws[1]


def test_the_newest_checkpoint_is_resumed_like_no_argument(tmp_path):
    first = make_trainer(tmp_path, max_steps=8, repo=str(tmp_path))
    first.train()
    newest = trainer_utils.get_last_checkpoint(str(tmp_path))
    assert newest == str(tmp_path / "checkpoint-8-g1")
    assert Path(newest).is_dir()
    damaged = next((tmp_path / "checkpoint-8-g1").glob("*.safetensors"))
    damaged.write_bytes(b"damaged")
    resumed = make_trainer(tmp_path, max_steps=9, repo=str(tmp_path))
    resumed.train(resume_from_checkpoint=newest)
    assert resumed.state.global_step == 9


def test_the_newest_checkpoint_of_transformers_is_found(tmp_path):
    theirs = pytest.importorskip("transformers.trainer_utils")
    assert trainer_utils.get_last_checkpoint(tmp_path) is None
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "other-11"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("")
    found = trainer_utils.get_last_checkpoint(str(tmp_path))
    assert found == theirs.get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    with pytest.raises(FileNotFoundError):
        trainer_utils.get_last_checkpoint(tmp_path / "none")
