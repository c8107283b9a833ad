"""Bytes that a save adds to the repository when most weights are frozen, against a full save.

One process trains adapters beside frozen linear layers (as LoRA does) with AdamW, on a local disk.
`frozen_save_bytes_over_full` is the disk space that each later save adds, divided by the disk space
of the first save. Both include the manifest. Adapters and their moments are 1% of the bytes of the
state. One variant trains 1% of the parameters, which are 3% of the bytes, because AdamW keeps two
moments of each. Another variant freezes nothing. Peers save the same state. `MEGAPARAMS` in the
environment sets the frozen parameters, 25 million by default.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.harness import Report
from resilient.checkpoint.catalog import committed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint.verify import verify
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import Emitter
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.storage.open import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
WIDTH = 1200
# Of W * W + 2 * W * rank parameters, 2 * W * rank are trained and have two moments each.
ONE_PERCENT_OF_BYTES = 2
ONE_PERCENT_OF_PARAMETERS = 6


class Adapted(nn.Module):
    """Frozen linear layer with a narrow trained layer beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(requires_grad=not rank)
        self.down = nn.Linear(width, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, width, bias=False) if rank else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both layers."""
        out: torch.Tensor = self.base(x)
        return out + self.up(self.down(x)) if self.down and self.up else out


class Training:
    """Model with AdamW, trained on noise.

    Args:
        layers: Number of linear layers of `WIDTH` squared.
        rank: Rank of the adapters; 0 trains everything.
    """

    def __init__(self, layers: int, rank: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Adapted(WIDTH, rank) for _ in range(layers)))
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    def step(self) -> None:
        """Make one training step."""
        self.optimizer.zero_grad()
        self.model(torch.randn(1, WIDTH)).square().mean().backward()
        self.optimizer.step()

    def share(self) -> float:
        """Return the share of the state's bytes that training changes."""
        model_bytes = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        trained_bytes = sum(parameter.nbytes for parameter in self.trained)
        return 3 * trained_bytes / (model_bytes + 2 * trained_bytes)


def run(rounds: int) -> Report:
    """Save each state once and then `rounds` times after a step."""
    torch.set_num_threads(1)
    layers = max(int(os.environ.get("MEGAPARAMS", "25")) * 1_000_000 // WIDTH**2, 1)
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {"rounds": rounds, "frozen_mparams": layers * WIDTH**2 / 1e6}
    contenders = {
        "frozen_save": (ONE_PERCENT_OF_BYTES, ours),
        "one_percent_of_parameters_save": (ONE_PERCENT_OF_PARAMETERS, ours),
        "nothing_frozen_save": (0, ours),
        "torch_save": (ONE_PERCENT_OF_BYTES, torch_save),
        "dcp_save": (ONE_PERCENT_OF_BYTES, dcp_save),
    }
    for name, (rank, saver) in contenders.items():
        training = Training(layers, rank)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            added, seconds = grow(Path(folder), training, saver(Path(folder), training), rounds)
            if saver is ours:
                prove(str(Path(folder) / "run"))
        ratios[f"{name}_bytes_over_full"] = round(median(added[1:]) / added[0], 4)
        figures[f"{name}_full_bytes"] = added[0]
        figures[f"{name}_bytes"] = median(added[1:])
        figures[f"{name}_full_seconds"] = round(seconds[0], 4)
        figures[f"{name}_seconds"] = round(median(seconds[1:]), 4)
        figures[f"{name}_trained_share"] = round(training.share(), 4)
    return Report("dedup", ratios, figures)


def grow(
    folder: Path, training: Training, save: Callable[[int], object], rounds: int
) -> tuple[list[int], list[float]]:
    """Return the bytes that each save added to the folder, and the seconds until it was durable."""
    added, seconds = [], []
    before = 0
    for number in range(1, rounds + 2):
        training.step()
        began = time.perf_counter()
        save(number)
        seconds.append(time.perf_counter() - began)
        after = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        added.append(after - before)
        before = after
    return added, seconds


def ours(folder: Path, training: Training) -> Callable[[int], object]:
    """Return a function that saves with our engine, which keeps all checkpoints."""
    url = str(folder / "run")
    checkpointer = open_engine(url, emit=Emitter(SystemClock()))
    named = NamedOptimizer(training.model, training.optimizer)
    parts = {"model": Part(training.model), "optimizer": Part(named)}
    checkpointer.resume(parts)

    def save(number: int) -> None:
        checkpointer.save(number, parts, CheckpointInfo())
        checkpointer.wait()

    return save


def prove(url: str) -> None:
    """Verify every byte of the newest checkpoint, because a small save must also be complete.

    Raises:
        RuntimeError: The checkpoint is damaged.
    """
    store = open_store(url)
    newest = committed(store)[0]
    if findings := verify(store, newest, "deep"):
        raise RuntimeError(f"{newest} is not whole: {findings[0]}")


def torch_save(folder: Path, training: Training) -> Callable[[int], object]:
    """Return a function that saves model and optimizer with ``torch.save``, and syncs the file."""

    def save(number: int) -> None:
        with (folder / f"{number}.pt").open("wb") as file:
            torch.save([training.model.state_dict(), training.optimizer.state_dict()], file)
            file.flush()
            os.fsync(file.fileno())

    return save


def dcp_save(folder: Path, training: Training) -> Callable[[int], object]:
    """Return a function that saves with torch.distributed.checkpoint."""

    def save(number: int) -> None:
        state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
        writer = dcp.FileSystemWriter(folder / str(number), thread_count=2)
        dcp.save(state, storage_writer=writer, no_dist=True)

    return save
