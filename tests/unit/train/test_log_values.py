"""Numbers of NumPy and torch in logs and metrics."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from resilient import Trainer, TrainerCallback
from resilient.errors import ConfigError, UnsavableState
from resilient.integrations.transformers import ResilientCallback
from tests.unit.train.models import Noisy, make_trainer

NUMBERS = {
    "float64": np.float64(1.5),
    "float32": np.float32(1.5),
    "int64": np.int64(3),
    "bool": np.bool_(1),
    "array": np.array([2.5]),
    "tensor": torch.tensor([[4.0]]),
    "text": np.str_("word"),
    "report": {"inner": np.float32(0.5), "list": [np.int64(1)]},
}
PLAIN = {
    "float64": 1.5,
    "float32": 1.5,
    "int64": 3,
    "bool": True,
    "array": 2.5,
    "tensor": 4.0,
    "text": "word",
    "report": {"inner": 0.5, "list": [1]},
}
ARRAYS = [np.array([1.0, 2.0]), torch.ones(2), {"deep": np.zeros(3)}, object()]


def logging_kind(base, logs):
    class Logs(base):
        def compute_loss(self, *given, **named):
            if self.model.training:
                self.log(dict(logs))
            return super().compute_loss(*given, **named)

    return Logs


def logged(history):
    entry = next(one for one in history if "float64" in one)
    return {name: value for name, value in entry.items() if name in NUMBERS}


def test_log_numpy_numbers_are_saved(tmp_path):
    trainer = make_trainer(tmp_path, kind=logging_kind(Trainer, NUMBERS), max_steps=4)
    trainer.train()
    assert trainer.state.global_step == 4
    assert logged(trainer.state.log_history) == PLAIN
    again = make_trainer(tmp_path, kind=logging_kind(Trainer, NUMBERS), max_steps=4)
    again.train()
    assert logged(again.state.log_history) == PLAIN
    json.dumps(again.state.log_history)


@pytest.mark.parametrize("value", ARRAYS, ids=lambda one: type(one).__name__)
def test_log_array_error_names_the_key(tmp_path, repository, value):
    trainer = make_trainer(tmp_path, kind=logging_kind(Trainer, {"odd": value}), max_steps=4)
    with pytest.raises(UnsavableState, match="cannot log `odd`"):
        trainer.train()


def with_metrics(tmp_path, value, **options):
    trainer = make_trainer(
        tmp_path, eval_size=4, max_steps=2, eval_strategy="steps", eval_steps=2, **options
    )
    trainer.compute_metrics = lambda _: {"odd": value}
    return trainer


@pytest.mark.parametrize("value", ARRAYS[:2], ids=lambda one: type(one).__name__)
def test_evaluation_array_metric_error_names_the_key(tmp_path, repository, value):
    with pytest.raises(UnsavableState, match=r"cannot log `eval_odd`.*shape"):
        with_metrics(tmp_path, value).train()


def test_prediction_keeps_array_metric(tmp_path, repository):
    trainer = with_metrics(tmp_path, ARRAYS[0])
    assert trainer.predict(trainer.eval_dataset).metrics["test_odd"] is ARRAYS[0]


class OwnMetrics(Trainer):
    value = np.float32(0.25)

    def evaluate(self, *given, **named):
        return {**super().evaluate(*given, **named), "eval_own": self.value}


class OwnArrays(OwnMetrics):
    value = np.zeros(2)


def test_best_metric_is_a_plain_number(tmp_path):
    options = {"metric_for_best_model": "own", "save_steps": 2}
    trainer = with_metrics(tmp_path, 1.0, kind=OwnMetrics, **options)
    trainer.train()
    assert type(trainer.state.best_metric) is float
    with pytest.raises(ConfigError, match="`eval_own` is a value of the class `ndarray`"):
        with_metrics(tmp_path / "other", 1.0, kind=OwnArrays, **options).train()


class TheirModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 3)

    def forward(self, x, labels=None):
        return {"loss": torch.nn.functional.cross_entropy(self.inner(x), labels)}


def adapted(tmp_path, logs):
    args = transformers.TrainingArguments(
        str(tmp_path / "out"),
        max_steps=4,
        save_steps=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=4,
    )
    kind = logging_kind(transformers.Trainer, logs)
    trainer = kind(TheirModel(), args, train_dataset=Noisy(8, augment=False))
    trainer.add_callback(ResilientCallback(trainer, str(tmp_path / "repo")))
    return trainer


def test_adapter_numpy_numbers_are_saved(tmp_path):
    trainer = adapted(tmp_path, NUMBERS)
    trainer.train()
    assert trainer.state.global_step == 4
    assert logged(trainer.state.log_history) == PLAIN
    again = adapted(tmp_path, NUMBERS)
    again.train()
    assert logged(again.state.log_history) == PLAIN


def test_adapter_array_error_names_the_key(tmp_path):
    with pytest.raises(UnsavableState, match="cannot log `odd`"):
        adapted(tmp_path, {"odd": ARRAYS[0]}).train()


@pytest.mark.parametrize("value", [True, np.bool_(1), torch.tensor(1.0) > 0], ids=str)
def test_boolean_metric_for_the_best_model_is_resumed(tmp_path, value):
    options = {
        "eval_size": 8,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "solved",
    }

    def trainer(steps):
        made = make_trainer(tmp_path, max_steps=steps, **options)
        made.compute_metrics = lambda _: {"solved": value}
        return made

    trainer(4).train()
    again = trainer(8)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_metric == 1.0


class Keeps(TrainerCallback):
    """State of Transformers' kind, with a NumPy number."""

    def __init__(self, best=None):
        self.best = best

    def state(self):
        return {"args": {}, "attributes": {"best": self.best}}

    @classmethod
    def from_state(cls, state):
        return cls(**state["attributes"])


def test_numpy_number_in_the_state_of_a_callback_is_resumed(tmp_path):
    make_trainer(tmp_path, max_steps=4, callbacks=[Keeps(np.float64(1.5))]).train()
    kept = Keeps()
    make_trainer(tmp_path, max_steps=8, callbacks=[kept]).train(resume_from_checkpoint=True)
    assert kept.best == 1.5


def test_numpy_number_that_a_callback_makes_the_best_metric_is_saved(tmp_path):
    class Sets(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            state.best_metric = np.float64(2.5)

    make_trainer(tmp_path, max_steps=4, callbacks=[Sets()]).train()
    trainer = make_trainer(tmp_path, max_steps=8)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_metric == 2.5


ODD_ROW = {
    **NUMBERS, "nan": np.float32("nan"), "inf": -np.inf, "scalar": np.array(7), "step": np.int64(4)
}  # fmt: skip
PLAIN_ROW = {**PLAIN, "nan": float("nan"), "inf": float("-inf"), "scalar": 7, "step": 4}


def setting(base):
    class Sets(base):
        """Sets fields and history of the trainer's state by itself, and keeps such a state."""

        best = None

        def on_step_end(self, args, state, control, **_):
            if state.global_step == 4:
                state.log_history.append(dict(ODD_ROW))
                state.best_metric = np.bool_(1)
                state.total_flos = np.float64(3.5)
                state.num_input_tokens_seen = np.int64(6)
                state.trial_params = {"lr": np.float64(0.5)}
                self.best = np.int64(5)

        def state(self):
            return {"args": {}, "attributes": {"best": self.best}}

        @classmethod
        def from_state(cls, state):
            made = cls()
            made.best = state["attributes"]["best"]
            return made

    return Sets


def ours(tmp_path, steps):
    return make_trainer(
        tmp_path, max_steps=steps, save_steps=2, callbacks=[setting(TrainerCallback)()]
    )


def adapters(tmp_path, steps):
    trainer = adapted(tmp_path, {})
    trainer.args.max_steps = steps
    kind = setting(transformers.TrainerCallback)
    kind.__bases__ += (transformers.trainer_callback.ExportableState,)
    trainer.add_callback(kind())
    return trainer


@pytest.mark.parametrize("make", [ours, adapters], ids=["trainer", "adapter"])
def test_odd_values_that_a_callback_sets_are_saved_and_resumed(tmp_path, make):
    make(tmp_path, 4).train()
    for steps in (6, 8):
        trainer = make(tmp_path, steps)
        trainer.train()
        state = trainer.state
        assert state.global_step == steps
        row = next(one for one in state.log_history if "scalar" in one)
        assert repr({name: row[name] for name in PLAIN_ROW}) == repr(PLAIN_ROW)
        assert (state.best_metric, state.num_input_tokens_seen) == (1.0, 6)
        json.dumps(state.log_history)
        state.save_to_json(str(tmp_path / "state.json"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda state: state.log_history.append({"odd": np.zeros(2)}), "odd"),
        (lambda state: state.log_history.append("a text"), "log_history"),
        (lambda state: setattr(state, "best_metric", "good"), "best_metric"),
        (lambda state: setattr(state, "epoch", None), "epoch"),
    ],
    ids=["array", "row", "metric", "epoch"],
)
def test_value_that_a_resume_rejects_is_refused_at_the_save(tmp_path, repository, change, name):
    class Sets(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            change(state)

    with pytest.raises(UnsavableState, match=f"`{name}`"):
        make_trainer(tmp_path, max_steps=4, save_steps=2, callbacks=[Sets()]).train()
