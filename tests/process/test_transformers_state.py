"""State of Hugging Face's Trainer beside its weights, resumed from every checkpoint."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resilient.errors import ConfigError
from resilient.format.keys import parse_checkpoint

pytestmark = [
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore"),  # the peers' own
]
transformers = pytest.importorskip("transformers")
from transformers.trainer_callback import ExportableState  # noqa: E402

ROWS = torch.rand(22, 3, generator=torch.Generator().manual_seed(5))
DATA = [{"x": row, "labels": row.sum()} for row in ROWS]


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x, labels):
        guessed = self.layers(x)
        return {"loss": (guessed.sum(1) - labels).square().mean(), "logits": guessed}


class Counter(transformers.TrainerCallback, ExportableState):
    """Keeps one number among its settings and one among its attributes."""

    def __init__(self, steps=0, limit=5) -> None:
        self.steps, self.limit, self.epochs = steps, limit, 0
        self.seen = []

    def on_step_end(self, args, state, control, **_):
        self.steps += 1

    def on_epoch_end(self, args, state, control, **_):
        self.epochs += 1
        self.seen.append((state.global_step, self.limit))

    def on_evaluate(self, args, state, control, **_):
        self.seen.append(("evaluated", state.global_step))

    def state(self):
        return {
            "args": {"steps": self.steps, "limit": self.limit},
            "attributes": {"epochs": self.epochs, "seen": self.seen},
        }


class EpochStop(transformers.TrainerCallback):
    """Ends each epoch after four steps."""

    def on_step_end(self, args, state, control, **_):
        control.should_epoch_stop = state.epoch % 1 > 0.6


class Registered:
    """An object that a script registers with the accelerator."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class GeneratorTrainer(transformers.Trainer):
    """Shuffles by a generator of its own."""

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(DATA, 4, shuffle=True, generator=generator)
        return self.accelerator.prepare(loader)


class NumberLogs(transformers.Trainer):
    """Logs numbers of other libraries."""

    def compute_loss(self, model, inputs, *rest, **more):
        self.log({
            "float64": np.mean([1.0, 2.0]), "float32": np.float32(0.5), "int64": np.int64(3),
            "bool": np.bool_(True), "tensor": torch.ones(1), "array": np.ones(1),
        })  # fmt: skip
        return super().compute_loss(model, inputs, *rest, **more)


def trained(folder, callbacks=(), kind=transformers.Trainer, **options):
    from resilient.integrations.transformers import ResilientCallback

    torch.manual_seed(1)
    args = transformers.TrainingArguments(
        str(folder.parent / f"{folder.name}-output"),
        **{
            "num_train_epochs": 3, "per_device_train_batch_size": 4, "save_steps": 2,
            "logging_steps": 3, "report_to": [], "disable_tqdm": True, "use_cpu": True,
            "remove_unused_columns": False, "label_names": ["labels"], "learning_rate": 0.05,
            **options,
        },
    )  # fmt: skip
    model = Guess()
    trainer = kind(model, args, train_dataset=DATA, eval_dataset=DATA[:8], callbacks=[*callbacks])
    registered = Registered()
    trainer.accelerator.register_for_checkpointing(registered)
    trainer.add_callback(ResilientCallback(trainer, folder))

    class Count(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            registered.value += 1

    trainer.add_callback(Count())
    trainer.train()
    state = trainer.state
    history = [
        {name: value for name, value in entry.items() if not name.endswith(("runtime", "second"))}
        for entry in state.log_history
        if "train_runtime" not in entry
    ]
    weights = [one.detach().numpy().tobytes() for one in trainer.model.state_dict().values()]
    counts = [(one.steps, one.epochs, one.seen) for one in callbacks if isinstance(one, Counter)]
    numbers = (state.global_step, state.epoch, state.num_input_tokens_seen, state.total_flos)
    return weights, history, counts, numbers, registered.value


def saved_steps(repository):
    return sorted(parse_checkpoint(one.name).step for one in repository.glob("checkpoint-*"))


def evaluated_by_epoch():
    return {
        "callbacks": [Counter(), Counter(limit=7)], "eval_strategy": "epoch", "eval_on_start": True,
        "logging_strategy": "epoch", "include_num_input_tokens_seen": "all",
    }  # fmt: skip


CONFIGURATIONS = {
    "evaluated_by_epoch": evaluated_by_epoch,
    "epoch_stop": lambda: {"callbacks": [EpochStop(), Counter()]},
    "epoch_stop_each_step_saved": lambda: {"callbacks": [EpochStop(), Counter()], "save_steps": 1},
    "own_generator": lambda: {"kind": GeneratorTrainer},
    "global_order": lambda: {"accelerator_config": {"use_seedable_sampler": False}},
    "plateau": lambda: {
        "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau",
        "metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0},
        "max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "num_train_epochs": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_transformers_resumed_from_each_save_ends_the_same(tmp_path, name):
    whole = tmp_path / "whole"
    expected = trained(whole, **CONFIGURATIONS[name]())
    steps = saved_steps(whole)
    assert len(steps) >= 3
    for step in steps:
        part = tmp_path / f"from-{step}"
        shutil.copytree(whole, part)
        for later in steps[steps.index(step) + 1 :]:
            shutil.rmtree(part / f"checkpoint-{later}-g1")
        assert trained(part, **CONFIGURATIONS[name]()) == expected, f"from step {step}"
        assert saved_steps(part) == steps


def early(folder, patience=2, **options):
    stopper = transformers.EarlyStoppingCallback(early_stopping_patience=patience)
    return trained(
        folder, [stopper], eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True, num_train_epochs=9, **options,
    )  # fmt: skip


@pytest.mark.smoke
def test_transformers_stopped_early_stays_stopped(tmp_path, capfd):
    whole = tmp_path / "whole"
    weights, *_, (stopped, *_), count = early(whole)
    assert stopped == count < 54
    before = tmp_path / "before"
    shutil.copytree(whole, before)
    shutil.rmtree(before / f"checkpoint-{stopped}-g1")
    resumed, *_, (step, *_), _ = early(before)
    assert (resumed, step) == (weights, stopped)
    capfd.readouterr()
    again, *_, (step, *_), _ = early(before)
    assert (again, step) == (weights, stopped)
    assert f"EarlyStoppingCallback stopped this run at step {stopped}" in capfd.readouterr().err
    # The settings are the script's: more patience trains on.
    *_, (step, *_), _ = early(before, patience=4)
    assert step == stopped + 4


class Stop(transformers.TrainerCallback):
    """Requests a stop, as at the end of the time of a job."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_save = state.global_step % 5 == 0


class SaveWithinStep(transformers.TrainerCallback):
    """Saves before the optimizer steps, as the callback for SIGTERM of Transformers does."""

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == 6:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            control.should_training_stop = True


def test_transformers_stopped_by_a_request_trains_on(tmp_path):
    unbroken = trained(tmp_path / "whole")
    for _ in range(4):
        broken = trained(tmp_path / "broken", [Stop()])
    assert broken[0] == unbroken[0]
    assert broken[3] == unbroken[3]


def test_transformers_save_within_a_step_comes_after_it(tmp_path):
    unbroken = trained(tmp_path / "whole", save_steps=100)

    class Trainer(transformers.Trainer):
        def train(self, *rest, **more):
            for one in self.callback_handler.callbacks:
                one.trainer = self
            return super().train(*rest, **more)

    trained(tmp_path / "broken", [SaveWithinStep()], kind=Trainer, save_steps=100)
    assert saved_steps(tmp_path / "broken") == [7]
    assert trained(tmp_path / "broken", save_steps=100)[0] == unbroken[0]


def test_transformers_numbers_of_numpy_are_logged(tmp_path):
    trained(tmp_path / "runs", kind=NumberLogs, max_steps=2)
    *_, (step, *_), _ = trained(tmp_path / "runs", kind=NumberLogs, max_steps=4)
    assert step == 4


def test_transformers_callback_gone_is_named(tmp_path, capfd):
    trained(tmp_path / "runs", [Counter()], max_steps=2)
    trained(tmp_path / "runs", max_steps=4)
    assert "not kept in checkpoints: Counter" in capfd.readouterr().err


def test_transformers_search_is_refused(tmp_path):
    from resilient.integrations.transformers import ResilientCallback

    args = transformers.TrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(Guess(), args, train_dataset=DATA)
    trainer.add_callback(ResilientCallback(trainer, tmp_path / "runs"))
    with pytest.raises(ConfigError, match="hyperparameter search"):
        trainer._init_training_state(1, 1, 1, None, {"lr": 1})
