"""Random training configurations: ours unbroken, ours killed and resumed, stock Transformers.

::

    python tests/helpers/configurations.py --count 300 --seed 1          # all of them
    python tests/helpers/configurations.py --only 17 --seed 1 --shows    # one, with its options

Each training is a fork of one process, which imports torch and Transformers once. One line of JSON
tells of each configuration: what differs, and the options if something does.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_callback import ExportableState

import resilient

KILLED = 9
_SECONDS_MAX = 120
LIVES_MAX = 12
EVENTS = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_evaluate"),
    *("on_prediction_step", "on_save", "on_log", "on_epoch_end", "on_train_end"),
)
SCHEDULES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("linear", "cosine", "constant", "constant_with_warmup")},
    **{name: {} for name in ("polynomial", "inverse_sqrt", "cosine_with_restarts")},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 3},
    "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5},
}
FED = ("reduce_lr_on_plateau",)
OPTIMIZERS: dict[str, str | None] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad")),
    "sgd": "momentum=0.9",
}


@dataclass
class Configuration:
    """One training.

    Attributes:
        seed: of the model and the data.
        options: of both TrainingArguments.
        ours: of ours alone.
        data: sizes of the training and the evaluation set; 0: no evaluation set.
        model: how the model is made.
        patience: of EarlyStoppingCallback; 0: none.
        acts: flag of the control -> steps at which a callback raises it.
        metrics: whether there are metrics beside the loss.
        sets: evaluation sets; several are in a dict.
        stream: whether the training set is a stream.
        given: whether the script gives the optimizer.
        kills: event and its number, one for each life that is killed.
    """

    seed: int
    options: dict[str, Any]
    ours: dict[str, Any]
    data: tuple[int, int]
    model: dict[str, Any]
    patience: int
    acts: dict[str, list[int]]
    metrics: bool
    sets: int = 1
    stream: bool = False
    given: bool = False
    kills: list[tuple[str, int]] = field(default_factory=list)


def draw(number: int, seed: int) -> Configuration:
    """Return the configuration of a number."""
    random = Random(f"{seed}/{number}")
    size, batch = random.randint(6, 24), random.randint(1, 5)
    accumulation = random.choice((1, 1, 2, 3, 4))
    options: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": random.randint(1, 5),
        "gradient_accumulation_steps": accumulation,
        "learning_rate": random.choice((0.1, 0.03, 0.003)),
        "weight_decay": random.choice((0.0, 0.0, 0.1)),
        "max_grad_norm": random.choice((0.0, 0.1, 1.0)),
        "warmup_steps": random.choice((0, 0, 2, 0.25)),
        "seed": random.randrange(1000),
        "dataloader_drop_last": random.random() < 0.2,
        "train_sampling_strategy": random.choice(("random", "random", "sequential")),
        "save_total_limit": random.choice((None, None, 1, 2)),
        "logging_first_step": random.random() < 0.3,
        "logging_strategy": random.choice(("steps", "steps", "steps", "epoch", "no")),
        "logging_steps": random.choice((1, 2, 3, 0.3)),
    }
    _draw_length(random, options)
    _draw_optimizer(random, options)
    patience = _draw_evaluation(random, options)
    dropout = random.choice((0.0, 0.0, 0.3))
    eval_size = random.randint(3, 9)
    if options["dataloader_drop_last"]:
        # Transformers leaves out samples of evaluations too: docs/parity.md.
        eval_size *= options["per_device_eval_batch_size"]
    configuration = Configuration(
        seed=random.randrange(1000),
        options=options,
        ours={"random_numbers": "transformers"} if dropout else {},
        data=(max(size, batch), eval_size),
        model={"dropout": dropout, "counts": random.random() < 0.3},
        patience=patience,
        acts=_draw_acts(random, evaluates=options["eval_strategy"] != "no"),
        metrics=options.get("metric_for_best_model") == "accuracy" or random.random() < 0.3,
    )
    _draw_more(random, configuration)
    configuration.kills = [_draw_kill(random) for _ in range(random.choice((1, 1, 2, 3)))]
    return configuration


def _draw_length(random: Random, options: dict[str, Any]) -> None:
    if random.random() < 0.3:
        options["data_seed"] = random.randrange(1000)
    if random.random() < 0.5:
        options["max_steps"] = random.randint(2, 12)
    else:
        options["num_train_epochs"] = random.choice((1, 1.5, 2, 3))


def _draw_more(random: Random, configuration: Configuration) -> None:
    options = configuration.options
    if options["eval_strategy"] != "no" and random.random() < 0.2:
        _split_evaluation(configuration)
    if random.random() < 0.2:
        configuration.given = True
    # With random numbers of Transformers ours takes no stream.
    if random.random() < 0.1 and "max_steps" in options and not configuration.ours:
        _make_stream(configuration)
    # Differs by design of models that do not count labels: docs/transformers.md.
    if random.random() < 0.3 and configuration.model["counts"]:
        options["label_smoothing_factor"] = 0.1
    if random.random() < 0.15:
        options["include_num_input_tokens_seen"] = random.choice(("all", "non_padding"))
    if random.random() < 0.05:
        # Kept workers draw other random numbers in Transformers: docs/transformers.md.
        options |= {
            "dataloader_num_workers": 1,
            "dataloader_persistent_workers": not configuration.ours,
        }


def _split_evaluation(configuration: Configuration) -> None:
    configuration.sets = 2
    if (
        "metric_for_best_model" in configuration.options
        or configuration.options["lr_scheduler_type"] in FED
    ):
        metric = configuration.options.get("metric_for_best_model", "loss")
        configuration.options["metric_for_best_model"] = f"b_{metric}"
        configuration.options["greater_is_better"] = metric == "accuracy"


def _make_stream(configuration: Configuration) -> None:
    configuration.stream = True
    configuration.options.pop("data_seed", None)
    configuration.options |= {"train_sampling_strategy": "random", "dataloader_drop_last": False}
    # Transformers loses a step that the end of a stream cuts short: docs/transformers.md.
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    step = configuration.options[names[0]] * configuration.options[names[1]]
    configuration.data = (step * max(1, round(configuration.data[0] / step)), configuration.data[1])


def _draw_optimizer(random: Random, options: dict[str, Any]) -> None:
    options["optim"] = random.choice([*OPTIMIZERS])
    if OPTIMIZERS[options["optim"]]:
        options["optim_args"] = OPTIMIZERS[options["optim"]]
    options["lr_scheduler_type"] = name = random.choice([*SCHEDULES])
    if SCHEDULES[name]:
        options["lr_scheduler_kwargs"] = dict(SCHEDULES[name])


def _draw_evaluation(random: Random, options: dict[str, Any]) -> int:
    """Draw when to evaluate and to save; return the patience of early stopping."""
    is_fed = options["lr_scheduler_type"] in FED
    strategy = random.choice(("steps", "epoch") if is_fed else ("no", "steps", "steps", "epoch"))
    options["eval_strategy"] = strategy
    if strategy == "steps":
        options["eval_steps"] = random.choice((1, 2, 3, 0.4))
    if strategy != "no":
        options["eval_delay"] = random.choice((0, 0, 2))
        options["eval_on_start"] = random.random() < 0.2
    saves = random.choice(("steps", "steps", "epoch", "no", "best"))
    saves = "steps" if strategy == "no" and saves == "best" else saves
    options["save_strategy"] = saves
    options["save_steps"] = random.choice((1, 2, 3, 0.5))
    patience = 0
    if strategy != "no" and (saves == "best" or random.random() < 0.6):
        options["metric_for_best_model"] = random.choice(("loss", "accuracy"))
        patience = random.choice((0, 1, 2))
        if saves == strategy and random.random() < 0.6:
            options["load_best_model_at_end"] = True
            options["save_steps"] = options.get("eval_steps", 1)
    return patience


def _draw_acts(random: Random, *, evaluates: bool) -> dict[str, list[int]]:
    acts: dict[str, list[int]] = {}
    flags = ["should_epoch_stop", "should_training_stop", "should_save", "should_log"]
    for flag in [*flags, *(["should_evaluate"] if evaluates else [])]:
        if random.random() < 0.2:
            acts[flag] = sorted(random.sample(range(1, 10), random.choice((1, 1, 2))))
    return acts


def _draw_kill(random: Random) -> tuple[str, int]:
    event = random.choice(EVENTS)
    return event, 1 if event in ("on_train_begin", "on_train_end") else random.randint(1, 8)


class Model(nn.Module):
    """Classifies; with ``counts`` it divides its loss as models of Transformers do."""

    def __init__(self, seed: int, dropout: float, *, counts: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner, self.norm, self.outer = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(dropout)
        self.accepts_loss_kwargs = counts
        self.config = transformers.PretrainedConfig(use_cache=False)
        self.main_input_name = "x"
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.outer(self.dropout(torch.tanh(self.norm(self.inner(x)))))
        output = {"logits": logits}
        if labels is not None and num_items_in_batch is not None:
            whole = nn.functional.cross_entropy(logits, labels, reduction="sum")
            output = {"loss": whole / num_items_in_batch, **output}
        elif labels is not None:
            output = {"loss": nn.functional.cross_entropy(logits, labels), **output}
        return output


class Samples(Dataset):
    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": int(self.y[index])}


class Stream(IterableDataset):
    """The same samples one after the other."""

    def __init__(self, size: int, seed: int) -> None:
        self.samples = Samples(size, seed)

    def __iter__(self):
        return (self.samples[nth] for nth in range(len(self.samples)))


def accuracy(prediction):
    hits = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": np.mean(hits)}


class Acts:
    """Raises flags at steps."""

    def __init__(self, acts):
        self.acts = acts

    def on_step_end(self, args, state, control, **_):
        for flag, steps in self.acts.items():
            if state.global_step in steps:
                setattr(control, flag, True)


class Counts:
    """Has a state."""

    def __init__(self, count=0):
        self.counted = count

    def on_step_end(self, args, state, control, **_):
        self.counted += 1

    def state(self):
        return {"args": {}, "attributes": {"counted": self.counted}}

    @classmethod
    def from_state(cls, state):
        counts = cls()
        counts.counted = state["attributes"]["counted"]
        return counts


class OurActs(Acts, resilient.TrainerCallback):
    pass


class OurCounts(Counts, resilient.TrainerCallback):
    pass


class TheirActs(Acts, transformers.TrainerCallback):
    pass


class TheirCounts(Counts, transformers.TrainerCallback, ExportableState):
    pass


class Kills(resilient.TrainerCallback):
    """Ends the process at an event."""

    def __init__(self, event: str, number: int) -> None:
        self.left = number

        def at_event(*_: Any, **__: Any) -> None:
            self.left -= 1
            if not self.left:
                os._exit(KILLED)

        setattr(self, event, at_event)


def our_trainer(configuration: Configuration, folder: Path, kill: tuple[str, int] | None) -> Any:
    """Return our trainer of a configuration."""
    callbacks = [OurActs(configuration.acts), OurCounts()]
    if configuration.patience:
        callbacks.append(resilient.EarlyStoppingCallback(configuration.patience))
    if kill is not None:
        callbacks.append(Kills(*kill))
    args = resilient.TrainingArguments(
        str(folder), disable_tqdm=True, **configuration.options, **configuration.ours
    )
    return _trainer(resilient.Trainer, configuration, args, callbacks)


def their_trainer(configuration: Configuration, folder: Path) -> Any:
    """Return the trainer of Transformers of a configuration."""
    callbacks = [TheirActs(configuration.acts), TheirCounts()]
    if configuration.patience:
        callbacks.append(transformers.EarlyStoppingCallback(configuration.patience))
    args = transformers.TrainingArguments(
        str(folder), disable_tqdm=True, report_to=[], use_cpu=True, **configuration.options
    )
    return _trainer(transformers.Trainer, configuration, args, callbacks)


def _trainer(kind: Any, configuration: Configuration, args: Any, callbacks: list[Any]) -> Any:
    size, eval_size = configuration.data
    model = Model(configuration.seed, **configuration.model)
    sets: Any = Samples(eval_size, 2) if args.eval_strategy != "no" else None
    if configuration.sets > 1:
        drops = args.dataloader_drop_last
        sets = {"a": Samples(args.per_device_eval_batch_size if drops else 3, 3), "b": sets}
    optimizer = (
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.5) if configuration.given else None
    )
    return kind(
        model,
        args,
        train_dataset=(Stream if configuration.stream else Samples)(size, 1),
        eval_dataset=sets,
        optimizers=(optimizer, None),
        compute_metrics=accuracy if configuration.metrics else None,
        callbacks=callbacks,
    )


def seen_of(trainer: Any, output: Any) -> dict[str, Any]:
    """Return what a training ended with."""
    state = trainer.state
    counts = next(o for o in trainer.callback_handler.callbacks if isinstance(o, Counts))
    moments = [
        {name: value for name, value in parameter_state.items() if torch.is_tensor(value)}
        for parameter_state in trainer.optimizer.state.values()
    ]
    return {
        "weights": {name: entry.clone() for name, entry in trainer.model.state_dict().items()},
        "moments": moments,
        "rates": [group["lr"] for group in trainer.optimizer.param_groups],
        "history": [dict(entry) for entry in state.log_history],
        "step": state.global_step,
        "epoch": state.epoch,
        "max_steps": state.max_steps,
        "best": (state.best_metric, state.best_global_step),
        "counted": counts.counted,
        "train_loss": output.training_loss,
        "stops": trainer.control.should_training_stop,
    }


def in_fork(work: Any, path: Path) -> tuple[int, Any]:
    """Run ``work`` in a fork; return its status, and its result or what it said."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        _in_child(work, path)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return status, pickle.loads(path.read_bytes())  # noqa: S301 - of our own child
    return status, path.with_suffix(".log").read_text()[-3000:]


def _in_child(work: Any, path: Path) -> None:
    signal.alarm(_SECONDS_MAX)
    log = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        path.write_bytes(pickle.dumps(work()))
    except BaseException:  # noqa: BLE001 - told to the parent, whatever it is
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def train_ours(configuration: Configuration, folder: Path, kill: tuple[str, int] | None) -> Any:
    trainer = our_trainer(configuration, folder, kill)
    return seen_of(trainer, trainer.train())


def train_theirs(configuration: Configuration, folder: Path) -> Any:
    trainer = their_trainer(configuration, folder)
    return seen_of(trainer, trainer.train())


def run_with_kills(configuration: Configuration, folder: Path) -> tuple[int, Any, int]:
    """Return how a training ended whose first lives were killed, and how many were."""
    for kills, kill in enumerate((*configuration.kills, None)):
        status, result = in_fork(
            lambda kill=kill: train_ours(configuration, folder, kill), folder / "told"
        )
        if status != KILLED:
            return status, result, kills
    raise AssertionError("the last life has no kill")


# Speeds, which no two runs share.
_SPEEDS = ("_runtime", "_per_second", "total_flos")
# Transformers' polynomial schedule divides by the steps after the warm-up, which may be zero.
_DIVISION = ("_get_polynomial_decay_schedule_with_warmup_lr_lambda", "ZeroDivisionError")


def compare_trainers(configuration: Configuration, place: Path) -> dict[str, Any]:
    """Run a configuration three times; return what differs."""
    folders = [place / name for name in ("unbroken", "resumed", "theirs")]
    for folder in folders:
        folder.mkdir(parents=True)
    first, our_result = in_fork(
        lambda: train_ours(configuration, folders[0], None), folders[0] / "told"
    )
    status, their_result = in_fork(
        lambda: train_theirs(configuration, folders[2]), folders[2] / "told"
    )
    is_divided = bool(status) and all(text in their_result for text in _DIVISION)
    if first or (status and not is_divided):
        return {
            "failed": {
                "ours": our_result if first else "",
                "theirs": their_result if status else "",
            }
        }
    status_after_kills, again, kills = run_with_kills(configuration, folders[1])
    report: dict[str, Any] = {"killed": kills, "steps": our_result["step"]}
    if status_after_kills:
        return {**report, "failed": {"resumed": again}}
    return {
        **report,
        "resumed": list(differences(our_result, again, exact=True)),
        "theirs": []
        if is_divided
        else list(
            differences(
                as_theirs(configuration, our_result),
                as_theirs(configuration, their_result),
                exact=False,
            )
        ),
    }


def as_theirs(configuration: Configuration, state: dict[str, Any]) -> dict[str, Any]:
    """Return what both trainers should end with: all but speeds, and the epoch of a stream."""
    left_out = {"epoch"} if configuration.stream else set()
    history = [
        {
            name: value
            for name, value in entry.items()
            if not name.endswith(_SPEEDS) and name not in left_out
        }
        for entry in state["history"]
    ]
    fields = {name: value for name, value in state.items() if name not in left_out}
    return {**fields, "history": history}


def differences(left: Any, right: Any, path: str = "", *, exact: bool) -> Any:
    """Yield where two results differ; numbers may by rounding unless ``exact``."""
    if isinstance(left, dict) and isinstance(right, dict):
        for name in sorted(left.keys() ^ right.keys()):
            yield f"{path}/{name} is in {'the first' if name in left else 'the second'} only"
        pairs = {name: (left[name], right[name]) for name in left if name in right}
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} entries: {left!r:.600} {right!r:.600}"
        pairs = {str(nth): pair for nth, pair in enumerate(zip(left, right, strict=False))}
    else:
        pairs = {}
        if not _is_same(left, right, exact=exact):
            yield f"{path}: {left!r:.80} {right!r:.80}"
    for name, pair in pairs.items():
        yield from differences(*pair, f"{path}/{name}", exact=exact)


def _is_same(left: Any, right: Any, *, exact: bool) -> bool:
    if torch.is_tensor(left) and torch.is_tensor(right):
        return torch.equal(left, right) or (
            not exact and left.shape == right.shape and torch.allclose(left, right, 1e-4, 1e-6)
        )
    if left == right or (left != left and right != right):  # noqa: PLR0124 - NaN is not itself
        return True
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return bool(not exact and numbers and abs(left - right) <= 1e-6 + 2e-4 * abs(left))


def main() -> int:
    """Run configurations; return 1 if something differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--begin", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--shows", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Imported once, and not in each fork.
    for name in ("Trainer", "TrainingArguments", "EarlyStoppingCallback"):
        getattr(resilient, name)
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108, PTH112 - to be quick
    numbers = (
        range(options.begin, options.begin + options.count)
        if options.only is None
        else [options.only]
    )
    differ = 0
    for number in numbers:
        place = Path(tempfile.mkdtemp(prefix="configuration-", dir=memory))
        try:
            configuration = draw(number, options.seed)
            report = compare_trainers(configuration, place)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        is_odd = any(report.get(name) for name in ("failed", "resumed", "theirs"))
        differ += is_odd
        fields = vars(configuration) if is_odd or options.shows else {}
        line = {"number": number, **report, **fields}
        sys.stdout.write(json.dumps(line, default=repr) + "\n")
        sys.stdout.flush()
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
