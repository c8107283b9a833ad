"""Cost of a save for training: with a saver daemon, with overlap, and during persistence."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from benchmarks.peers.quiet import undisturbed
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import Emitter
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from benchmarks.peers.training import Training
    from resilient.checkpoint_engine import CheckpointEngine

WIDTH = 1024
BATCH = 64
UNDISTURBED_SECONDS = 6.0
"""Seconds without a save that are measured before and after each save.

A save takes about half of the interval between two saves, so there is one save per 24 s. Real
runs save less often.
"""

Figures = dict[str, float]
Contender = Callable[[Path], Figures]


def keeper_of(training: Training, folder: Path) -> Contender:
    """Save through a saver daemon, which stages in shared memory."""
    parts = training.parts()
    checkpointer = open_with_keeper(folder)
    checkpointer.resume(parts)
    checkpointer.warm(parts)
    step = 0

    def save(_: Path) -> Figures:
        nonlocal step
        step += 1
        training.change()
        began = time.perf_counter()
        checkpointer.save(step, parts, CheckpointInfo())
        stall = time.perf_counter() - began
        checkpointer.wait()
        return {"stall": stall, "durable": time.perf_counter() - began}

    return save


def open_with_keeper(folder: Path) -> CheckpointEngine:
    """Return an engine that uses a saver daemon of its own."""
    checkpointer = open_quietly(folder, start_keeper())
    atexit.register(checkpointer.close)
    return checkpointer


def start_keeper() -> DaemonAddress:
    """Start a saver daemon that ends with this process."""
    socket = str(Path(tempfile.mkdtemp(prefix="resilient-bench-")) / "keeper")
    command = [sys.executable, "-m", "resilient.checkpoint.daemon.server", "--socket", socket]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    return DaemonAddress(socket)


def open_quietly(
    folder: Path,
    keeper: DaemonAddress | None = None,
    pace_seconds_max: float = 60.0,
    scope: str = "0",
) -> CheckpointEngine:
    """Return an engine that keeps one checkpoint and emits no events."""
    emit = Emitter(SystemClock(), ())
    return open_engine(
        str(folder.absolute()),
        emit=emit,
        keep_last=1,
        keeper=keeper,
        pace_seconds_max=pace_seconds_max,
        scope=scope,
    )


class Loop:
    """Training loop of linear layers and AdamW, one call per phase of a step."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        blocks = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.model = nn.Sequential(*blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(BATCH, width)
        self.parts = {
            "model": Part(self.model),
            "optimizer": Part(NamedOptimizer(self.model, self.optimizer)),
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters and their two moments."""
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())

    @classmethod
    def of_size(cls, size_bytes: int) -> Loop:
        """Return a loop with a state of about this size, after one step."""
        loop = cls(max(round(size_bytes / (12 * WIDTH * WIDTH)), 1))
        loop.forward_backward()
        loop.update()
        return loop

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, for peers that save flat dictionaries."""
        state = self.optimizer.state_dict()["state"]
        moments = {
            f"optimizer.{number}.{kind}": tensor
            for number, kinds in state.items()
            for kind, tensor in kinds.items()
        }
        return {**self.model.state_dict(), **moments}

    def settle(self) -> None:
        """Make a step, as between two saves, so that the code of training is warm again."""
        self.forward_backward()
        self.update()

    def forward_backward(self) -> None:
        """Compute the gradients."""
        self.model(self.batch).square().mean().backward()

    def update(self) -> None:
        """Make the optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def overlap_of(loop: Loop, size_bytes: int, folder: Path) -> Contender:
    """Save with overlap; the stall is the whole wait of training in save() and before_update().

    The stall is scaled to ``size_bytes``, because the number of layers is whole.
    """
    checkpointer = open_quietly(folder)
    checkpointer.resume({})
    step = 0

    def save(_: Path) -> Figures:
        nonlocal step
        step += 1
        loop.settle()
        began = time.perf_counter()
        checkpointer.save(step, loop.parts, CheckpointInfo(), overlap=True)
        saved = time.perf_counter()
        loop.forward_backward()
        passed = time.perf_counter()
        checkpointer.before_update()
        stall = saved - began + time.perf_counter() - passed
        loop.update()
        checkpointer.wait()
        durable = time.perf_counter() - began
        scale = size_bytes / loop.size_bytes
        return {
            "stall": stall * scale,
            "call": (saved - began) * scale,
            "durable": durable * scale,
            "pass": passed - saved,
        }

    atexit.register(checkpointer.close)
    return save


def speeds_while_persisting(training: Training, folder: Path, rounds: int) -> Figures:
    """Return steps/s while a save is persisted over steps/s without a save, on all cores.

    The save is persisted by a thread with the default throttle, by a thread at full speed, and by a
    saver daemon. The daemon is a separate process at low priority. The result also has the duration
    of each save.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    found = {}
    openings: dict[str, Callable[[Path], CheckpointEngine]] = {
        "": open_quietly,
        "_at_full_speed": partial(open_quietly, pace_seconds_max=0.0),
        "_by_keeper": lambda place: open_quietly(place, start_keeper()),
    }
    for name, opening in openings.items():
        save = _speed_of(training, folder / f"speed{name}", opening)
        figures = [undisturbed(save) for _ in range(rounds + 1)][1:]
        for what in ("training_speed", "persisting_seconds"):
            found[f"{what}_while_persisting{name}"] = round(
                median(figure[what] for figure in figures), 4
            )
        found[f"speed{name}_others_cores"] = round(
            max(figure["others_cores"] for figure in figures), 4
        )
    torch.set_num_threads(threads)
    return found


def _speed_of(
    training: Training, folder: Path, opening: Callable[[Path], CheckpointEngine]
) -> Callable[[], Figures]:
    loop, parts = Loop(4, 512), training.parts()
    checkpointer = opening(folder)
    checkpointer.resume({})
    atexit.register(checkpointer.close)
    step = 0

    def save() -> Figures:
        nonlocal step
        step += 1
        training.change()
        before = _steps_per_second(loop, _for_seconds(UNDISTURBED_SECONDS))
        checkpointer.save(step, parts, CheckpointInfo())
        began = time.perf_counter()
        while_persisting = _steps_per_second(loop, _while_persisting(folder, step))
        took = time.perf_counter() - began
        checkpointer.wait()
        after = _steps_per_second(loop, _for_seconds(UNDISTURBED_SECONDS))
        speed = 2 * while_persisting / (before + after)
        return {"training_speed": speed, "persisting_seconds": took}

    return save


def _steps_per_second(loop: Loop, times: Iterator[None]) -> float:
    began, steps = time.perf_counter(), 0
    for _ in times:
        loop.forward_backward()
        loop.update()
        steps += 1
    return steps / (time.perf_counter() - began)


def _for_seconds(seconds: float) -> Iterator[None]:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        yield


def _while_persisting(folder: Path, step: int) -> Iterator[None]:
    manifest = folder / f"checkpoint-{step}-g1" / "manifest.json"
    while not manifest.exists():
        yield
