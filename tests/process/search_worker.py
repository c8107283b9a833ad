"""Searches by two ranks: unbroken, killed in two of its trials, and with a study that fails.

python search_worker.py FOLDER PORT...

Each life is a world of its own. Each rank writes down what it trained (``seen-<rank>.jsonl``) and
what it found or was told at the end (``found-<rank>.json``).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import optuna
import torch

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.errors import ResilientError
from tests.process.deepspeed_forks import exit_codes, fork_world
from tests.process.dying import die_together
from tests.unit.train.models import Net, Noisy

TRIALS, SAVE_STEPS = 4, 2
# (folder, the trial and the step in which all ranks are killed)
WORLDS = [
    ("unbroken", None),
    ("killed", (1, 2)),
    ("killed", (2, 3)),
    ("killed", None),
    ("without a result", None),
    ("without a study", None),
]


def space(trial):
    """Suggest under a name that is no argument's, and what is for the model."""
    trial.suggest_float("dropout", 0.1, 0.6)
    return {
        "learning_rate": trial.suggest_float("rate", 1e-3, 1e-1, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("batch", [2, 4]),
    }


def sized(trial):
    model = Net()
    if trial is not None:
        model.layers[2].p = trial.suggest_float("dropout", 0.1, 0.6)
    return model


class PrunesSecond(optuna.pruners.BasePruner):
    """Prunes the second trial at its second evaluation."""

    def prune(self, study, trial):
        return trial.number == 1 and trial.last_step == 4


class Watch(TrainerCallback):
    """Writes down what each training begins and ends with, and dies in the middle of one."""

    def __init__(self, folder, die_in) -> None:
        self._folder = folder
        self._die_in = die_in

    def __deepcopy__(self, memo):
        return self

    def _write(self, **said):
        with (self._folder / f"seen-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")

    def on_train_begin(self, args, state, control, /, *, model, **_):
        self._write(
            begins_at=state.global_step,
            folder=Path(args.output_dir).name,
            rate=args.learning_rate,
            batch=args.per_device_train_batch_size,
            dropout=model.layers[2].p,
            name=state.trial_name,
            params=state.trial_params,
        )

    def on_step_end(self, args, state, control, /, **_):
        # Before the evaluation and the save of this step.
        number = int(args.output_dir.rpartition("-")[2])
        if self._die_in == (number, state.global_step):
            die_together(args.output_dir, state.global_step, SAVE_STEPS)

    def on_train_end(self, args, state, control, /, *, model, **_):
        self._write(
            ends_at=state.global_step,
            weights=sum(float(one.double().sum()) for one in model.parameters()),
        )


class Fails:
    """A study that cannot be reached."""

    def ask(self):
        raise ResilientError("the study is out of reach")


def main(folder, ports):
    gc.collect()
    gc.freeze()
    for (run, die_in), port in zip(WORLDS, ports, strict=True):
        ranks = fork_world(2, port, partial(search, folder / run, die_in))
        if ranks is None:
            return
        ends = exit_codes(ranks)
        assert ends == ({-signal.SIGKILL} if die_in else {0}), (run, ends)


def search(folder, die_in):
    warnings.simplefilter("ignore")
    optuna.logging.disable_default_handler()
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    folder.mkdir(exist_ok=True)
    trainer = Trainer(
        args=TrainingArguments(
            str(folder),
            max_steps=6,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=SAVE_STEPS,
            disable_tqdm=True,
            use_cpu=True,
        ),
        model_init=sized,
        train_dataset=Noisy(48),
        eval_dataset=Noisy(9, augment=False),
        callbacks=[Watch(folder, die_in)],
    )
    options = {"n_trials": TRIALS, "pruner": PrunesSecond()}
    if folder.name == "without a result":
        options = {"n_trials": 1, "compute_objective": lambda _metrics: float("nan")}
    if folder.name == "without a study":
        options = {"backend": Fails()}
    try:
        found = trainer.hyperparameter_search(
            space, hp_name=lambda trial: f"batch {trial.params['batch']}", **options
        )
        said = {"best": found[:3]}
    except ResilientError as error:
        said = {"error": type(error).__name__, "message": error.message}
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]])
