"""Time per optimizer step with canonical reduction, against our Trainer with DDP's own all-reduce.

All contenders train the same model on the same micro-batches, four per step, with equally many
passes per rank. They use gloo on the CPU, and one thread per rank. The model is a perceptron of
four layers with 16 MiB of gradients, AdamW and clipping. A turn measures one contender, whose ranks
are forks of this process. Its result is the median step time on rank 0, without the warm-up steps.
`canonical` gives all ranks the whole gradient, as DDP does. In `sharded` each rank updates only its
share of the parameters (`shard_optimizer_state`). A run with one rank is measured too, without DDP.
There, canonical reduction adds micro-batches in a tree instead of a chain. With more ranks than
cores, the ranks share cores, which makes every contender slower.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import resilient
from benchmarks.harness import Report, medians, ratio, spread, take_turns
from resilient.distributed.launch_env import LaunchEnv, World, write_launch

ROUNDS = 5
RANKS = (1, 2, 4)
MICRO_BATCHES = 4
BATCH = 16
WIDTH = 1024
LAYERS = 4
WARM_UP_STEPS = 2
STEPS = 9

KINDS: dict[str, dict[str, Any]] = {
    "native": {},
    "canonical": {"reduction": "canonical"},
    "sharded": {"reduction": "canonical", "shard_optimizer_state": True},
}


class Model(nn.Module):
    """Model of layers of one width; returns its loss first."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the squared distance to the labels."""
        return {"loss": (self.layers(inputs) - labels).square().mean()}


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Samples for all steps, all the same."""

    def __init__(self) -> None:
        self.one = {"inputs": torch.ones(WIDTH), "labels": torch.zeros(WIDTH)}

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.one


class Watch(resilient.TrainerCallback):
    """Callback that records the end of each step."""

    def __init__(self) -> None:
        self.at_seconds: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self.at_seconds.append(time.perf_counter())


def run(rounds: int) -> Report:
    """Measure every kind at every number of ranks `rounds` times."""
    torch.set_num_threads(1)
    names = {f"{kind}_{ranks}": (kind, ranks) for ranks in RANKS for kind in KINDS}
    contenders = {name: partial(_seconds, *arguments) for name, arguments in names.items()}
    found = take_turns(contenders, rounds)
    pairs = {
        f"{kind}_over_native_{ranks}": (f"{kind}_{ranks}", f"native_{ranks}")
        for kind in ("canonical", "sharded")
        for ranks in RANKS
    }
    notes = {
        "rounds": rounds,
        **{f"{name}_lowest_highest": spread(found, *pair) for name, pair in pairs.items()},
    }
    ratios = {name: ratio(found, *pair) for name, pair in pairs.items()}
    return Report("canonical", ratios, {**notes, **medians(found, "milliseconds", scale=1e3)})


def _seconds(kind: str, ranks: int) -> float:
    """Return the median time of a step of a contender."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = [_fork(Path(folder), kind, World(rank, ranks, rank), port) for rank in range(ranks)]
        ends = [os.waitpid(pid, 0)[1] for pid in pids]
        assert ends == [0] * ranks, f"{kind} on {ranks} ranks ended with {ends}"
        return float((Path(folder) / "seconds").read_text())


def _fork(folder: Path, kind: str, world: World, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(write_launch(LaunchEnv(world, "127.0.0.1", port)))
        _train(folder, kind, world)
        code = 0
    finally:
        os._exit(code)


def _train(folder: Path, kind: str, world: World) -> None:
    watch, is_native = Watch(), kind == "native"
    arguments = resilient.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_BATCHES // world.size if is_native else 1,
        global_train_batch_size=None if is_native else MICRO_BATCHES * BATCH,
        save_strategy="no", logging_steps=STEPS, eval_strategy="no", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, threads_per_rank=1, log_level="error",
        **KINDS[kind],
    )  # fmt: skip
    trainer = resilient.Trainer(Model(), arguments, train_dataset=Samples(), callbacks=[watch])
    trainer.train()
    if world.is_coordinator:
        ends = watch.at_seconds[WARM_UP_STEPS:]
        steps = [later - before for before, later in itertools.pairwise(ends)]
        (folder / "seconds").write_text(str(statistics.median(steps)))
