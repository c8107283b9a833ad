"""Time per optimizer step of our Trainer, against a bare loop, accelerate and transformers.

All contenders do the same work on the CPU with one thread: zero_grad, forward, backward, clipping
and AdamW. AdamW has two parameter groups, as in both trainers: weights, and biases without weight
decay. All contenders also use LambdaLR, a DataLoader and a progress bar, and print the loss every
ten steps. Nothing is saved or evaluated. The figure is the mean time of a step from the end of the
last warm-up step to the end of the last step. All contenders take turns in one process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from benchmarks.harness import Report, installed, medians, ratio, spread, take_turns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

ROUNDS = 15
WARM_UP_STEPS = 50
MEASURED_STEPS = 250
STEPS = WARM_UP_STEPS + MEASURED_STEPS
LOGGING_STEPS = 10
BATCH = 32
WIDTH = 256
CLASSES = 10
LEARNING_RATE = 1e-3
MAX_NORM = 1.0

PAIRS = (
    ("ours", "bare"),
    ("ours", "hf"),
    ("ours", "accelerate"),
    ("hf", "bare"),
    ("accelerate", "bare"),
)

Sample = dict[str, Any]
Contender = Callable[["Dataset[Sample]"], float]


class Mlp(nn.Module):
    """Perceptron that returns its loss first, as the trainers require."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )  # fmt: skip

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        logits = self.layers(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Points(Dataset[Sample]):
    """Random points, one batch for each step of one epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(STEPS * BATCH, WIDTH, generator=generator)
        self.labels = torch.randint(CLASSES, (STEPS * BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Sample:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


def collate(samples: list[Sample]) -> Sample:
    """Stack samples; all contenders use this function."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@dataclass
class Stopwatch:
    """Readings of the clock at the end of the last warm-up step and of the last step."""

    done: int = 0
    readings: list[float] = field(default_factory=list)

    def step_ended(self) -> None:
        """Count one step."""
        self.done += 1
        if self.done in (WARM_UP_STEPS, STEPS):
            self.readings.append(time.perf_counter())

    @property
    def seconds_per_step(self) -> float:
        """Mean over the measured steps."""
        assert self.done == STEPS, f"{self.done} steps instead of {STEPS}"
        return (self.readings[1] - self.readings[0]) / MEASURED_STEPS


def run(rounds: int) -> Report:
    """Measure every contender that is installed."""
    torch.set_num_threads(1)
    points = Points()
    present, notes = _present()
    calls = {name: _quietly(contender, points) for name, contender in present.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        take_turns(calls, 1)
        found = take_turns(calls, rounds)
    pairs = [(first, other) for first, other in PAIRS if first in present and other in present]
    figures = {
        "rounds": rounds,
        "steps_per_round": MEASURED_STEPS,
        **medians(found, "microseconds_per_step", scale=1e6),
        **{
            f"{first}_over_{other}_lowest_highest": spread(found, first, other)
            for first, other in pairs
        },
        **{f"{name}_version": installed(name) for name in ("accelerate", "transformers")},
        **notes,
    }
    ratios = {f"{first}_over_{other}": ratio(found, first, other) for first, other in pairs}
    return Report("loop", ratios, figures)


def _present() -> tuple[Mapping[str, Contender], Mapping[str, str]]:
    """Return the contenders that can be imported, and the reason for each of the others."""
    homes = {
        "ours": ("resilient.train.trainer", ours),
        "accelerate": ("accelerate", accelerated),
        "hf": ("transformers", hf),
    }
    present: dict[str, Contender] = {"bare": bare}
    notes = {}
    for name, (home, contender) in homes.items():
        try:
            import_module(home)
        except ImportError as error:
            notes[f"{name}_note"] = f"not measured: {error}"
        else:
            present[name] = contender
    return present, notes


def bare(points: Dataset[Sample]) -> float:
    """Measure a loop that is written by hand."""
    model, optimizer, scheduler, loader = _parts(points)
    parameters, watch, total = list(model.parameters()), Stopwatch(), torch.zeros(())
    for batch in tqdm(loader, dynamic_ncols=True):
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total += loss.detach()
        if (watch.done + 1) % LOGGING_STEPS == 0:
            tqdm.write(f"step {watch.done + 1} loss {total.item() / LOGGING_STEPS:.4g}")
            total.zero_()
        watch.step_ended()
    return watch.seconds_per_step


def accelerated(points: Dataset[Sample]) -> float:
    """Measure the same loop, as in accelerate's documentation."""
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*_in_its_order(_parts(points)))
    parameters, watch, total = list(model.parameters()), Stopwatch(), torch.zeros(())
    for batch in tqdm(loader, dynamic_ncols=True):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total += loss.detach()
        if (watch.done + 1) % LOGGING_STEPS == 0:
            tqdm.write(f"step {watch.done + 1} loss {total.item() / LOGGING_STEPS:.4g}")
            total.zero_()
        watch.step_ended()
    return watch.seconds_per_step


def hf(points: Dataset[Sample]) -> float:
    """Measure the Trainer of transformers."""
    import transformers

    return _trainer(transformers, points, report_to=[], accelerator_config={"split_batches": False})


def ours(points: Dataset[Sample]) -> float:
    """Measure our Trainer."""
    import resilient

    return _trainer(resilient, points)


def _trainer(library: Any, points: Dataset[Sample], **more: Any) -> float:
    """Measure a Trainer with the interface that both libraries share."""
    watch = Stopwatch()

    class Watching(library.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            watch.step_ended()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH,
            learning_rate=LEARNING_RATE, max_grad_norm=MAX_NORM, optim="adamw_torch",
            lr_scheduler_type="linear", logging_steps=LOGGING_STEPS, save_strategy="no",
            eval_strategy="no", use_cpu=True, disable_tqdm=False, dataloader_pin_memory=False,
            **more,
        )  # fmt: skip
        trainer = library.Trainer(
            model=Mlp(), args=arguments, train_dataset=points, data_collator=collate,
            callbacks=[Watching()],
        )  # fmt: skip
        trainer.train()
    return watch.seconds_per_step


def _parts(points: Dataset[Sample]) -> tuple[nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    model = Mlp()
    weights = [
        parameter for name, parameter in model.named_parameters() if not name.endswith("bias")
    ]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.0}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    return model, optimizer, scheduler, DataLoader(points, BATCH, shuffle=True, collate_fn=collate)


def _in_its_order(parts: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    model, optimizer, scheduler, loader = parts
    return model, optimizer, loader, scheduler


def _quietly(contender: Contender, points: Dataset[Sample]) -> Callable[[], float]:
    """Return the contender with its output discarded, but not the cost of writing it."""

    def call() -> float:
        with (
            Path(os.devnull).open("w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            return contender(points)

    return call
