"""Time of our Trainer to resume at step 1,000,000 of a run, against step 10.

The time runs from the call of ``train()`` to the end of the first step. A new Trainer resumes from
a local repository, on the CPU with one thread. No run trains a million steps here. Instead, a
callback sets the state of such a run: step, place in the data, schedule and log history. The
Trainer then trains ten steps from there and saves.

`10` has trained ten steps. `million` is in epoch 1,000, with a log entry per 500 steps, the
default. `10_in_one_epoch` and `late_in_one_epoch` are near the two ends of an epoch of 125,000
steps. `million_logged_every_10` has a log history of 100,000 entries. Each resume reads and digests
the history of 12 MB, so its time grows with the history.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import resilient
from benchmarks.harness import Report, medians, ratio, spread, take_turns
from benchmarks.loop import BATCH, CLASSES, WIDTH, Mlp, Sample, collate

ROUNDS = 9
STEPS_TRAINED = 10
MILLION = 1_000_000
SMALL = 1_000 * BATCH
LARGE = MILLION // 8 * BATCH
"""Samples of an epoch of 1,000 steps, and of one of 125,000."""


class Same(Dataset[Sample]):
    """Any number of samples, all the same."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.one = {"inputs": torch.ones(WIDTH), "labels": torch.tensor(CLASSES - 1)}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        return self.one


@dataclass(frozen=True)
class Place:
    """Place in a run.

    Attributes:
        step: Number of steps before it.
        samples: Samples in one epoch.
        logging_steps: Steps between two entries of the log history.
    """

    step: int
    samples: int = SMALL
    logging_steps: int = 500


PLACES = {
    "10": Place(STEPS_TRAINED),
    "million": Place(MILLION),
    "million_logged_every_10": Place(MILLION, logging_steps=10),
    "10_in_one_epoch": Place(STEPS_TRAINED, LARGE),
    "late_in_one_epoch": Place(LARGE // BATCH - 100, LARGE),
}


def run(rounds: int) -> Report:
    """Measure every place `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        contenders = {}
        for name, place in PLACES.items():
            repository = Path(folder) / name
            _trainer(place, repository, place.step, [_Jump(place)], save=True).train()
            contenders[name] = partial(_seconds, place, repository)
        take_turns(contenders, 1)
        found = take_turns(contenders, rounds)
    pairs = {
        "resume_at_million_over_10": ("million", "10"),
        "resume_late_in_one_epoch_over_10": ("late_in_one_epoch", "10_in_one_epoch"),
        "resume_with_100000_log_entries_over_10": ("million_logged_every_10", "10"),
    }
    notes = {
        "rounds": rounds,
        "resume_at_million_over_10_lowest_highest": spread(found, "million", "10"),
    }
    ratios = {name: ratio(found, *pair) for name, pair in pairs.items()}
    return Report("resume", ratios, {**notes, **medians(found, "milliseconds", scale=1e3)})


def _seconds(place: Place, repository: Path) -> float:
    """Return the seconds to train one step from a place."""
    watch = _Watch()
    trainer = _trainer(place, repository, place.step + 1, [watch], save=False)
    began = time.perf_counter()
    trainer.train()
    assert trainer.state.global_step == place.step + 1, "it did not resume there"
    return watch.at_seconds - began


class _Watch(resilient.TrainerCallback):
    """Callback that records the end of the first step."""

    at_seconds = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at_seconds = self.at_seconds or time.perf_counter()


class _Jump(resilient.TrainerCallback):
    """Callback that moves a run to ten steps before a place."""

    trainer: Any

    def __init__(self, place: Place) -> None:
        self.place = place

    def on_train_begin(self, *arguments: Any, **_: Any) -> None:
        _, state, _ = arguments
        before = self.place.step - STEPS_TRAINED
        state.global_step = before
        epoch, within = divmod(before * BATCH, self.place.samples)
        cursor = self.trainer.train_sampler.cursor
        cursor.epoch, cursor.samples = epoch, within
        self.trainer.lr_scheduler.last_epoch = before
        every = self.place.logging_steps
        state.log_history = [
            {"loss": 1 / step, "grad_norm": 0.1, "learning_rate": 1e-3, "epoch": 0.5, "step": step}
            for step in range(every, before + 1, every)
        ]


def _trainer(place: Place, folder: Path, steps: int, callbacks: Any, *, save: bool) -> Any:
    arguments = resilient.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=BATCH,
        logging_steps=place.logging_steps, save_strategy="steps" if save else "no",
        save_steps=steps, eval_strategy="no", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = resilient.Trainer(
        model=Mlp(), args=arguments, train_dataset=Same(place.samples), data_collator=collate,
        callbacks=callbacks,
    )  # fmt: skip
    for callback in callbacks:
        callback.trainer = trainer
    return trainer
