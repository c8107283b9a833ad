"""What a save costs training: with a keeper, with overlap, and while it is being persisted."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn

from resilient.checkpointer import About
from resilient.clock import SystemClock
from resilient.events import Emitter
from resilient.opening import open_checkpointer
from resilient.state.capture import Part
from resilient.state.optimizer import NamedOptimizer
from resilient.vault.link import KeeperAddress

if TYPE_CHECKING:
    from benchmarks.peers.training import Training
    from resilient.checkpointer import Checkpointer

WIDTH = 1024
BATCH = 64
UNDISTURBED_SECONDS = 2.0

Figures = dict[str, float]
Contender = Callable[[Path], Figures]


def keeper_of(training: Training, folder: Path) -> Contender:
    """Save through a keeper process, which stages in shared memory."""
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
        checkpointer.save(step, parts, About())
        stall = time.perf_counter() - began
        checkpointer.wait()
        return {"stall": stall, "durable": time.perf_counter() - began}

    return save


def open_with_keeper(folder: Path) -> Checkpointer:
    """Start a keeper that ends with this process, and return a checkpointer that uses it."""
    socket = str(Path(tempfile.mkdtemp(prefix="resilient-bench-")) / "keeper")
    command = [sys.executable, "-m", "resilient.vault.keeper", "--socket", socket]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    checkpointer = open_quietly(folder, KeeperAddress(socket))
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    atexit.register(checkpointer.close)
    return checkpointer


def open_quietly(folder: Path, keeper: KeeperAddress | None = None) -> Checkpointer:
    """Return a checkpointer that keeps one checkpoint and tells nobody."""
    emit = Emitter(SystemClock(), ())
    return open_checkpointer(str(folder.absolute()), emit=emit, keep_last=1, keeper=keeper)


class Loop:
    """A real training loop of linear layers and AdamW, step by step."""

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
        """Parameters and two moments."""
        return 3 * sum(one.nbytes for one in self.model.parameters())

    def forward_backward(self) -> None:
        """Leave gradients behind."""
        self.model(self.batch).square().mean().backward()

    def update(self) -> None:
        """Make the optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def overlap_of(size_bytes: int, folder: Path) -> Contender:
    """Save with overlap; the stall is all that training waits in save() and before_update().

    It is scaled to ``size_bytes``, for layers are whole.
    """
    loop = Loop(max(round(size_bytes / (12 * WIDTH * WIDTH)), 1))
    loop.forward_backward()
    loop.update()
    checkpointer = open_quietly(folder)
    checkpointer.resume({})
    step = 0

    def save(_: Path) -> Figures:
        nonlocal step
        step += 1
        began = time.perf_counter()
        checkpointer.save(step, loop.parts, About(), overlap=True)
        saved = time.perf_counter()
        loop.forward_backward()
        passed = time.perf_counter()
        checkpointer.before_update()
        stall = saved - began + time.perf_counter() - passed
        loop.update()
        checkpointer.wait()
        durable = time.perf_counter() - began
        scale = size_bytes / loop.size_bytes
        return {"stall": stall * scale, "durable": durable * scale, "pass": passed - saved}

    atexit.register(checkpointer.close)
    return save


def training_speed_while_persisting(training: Training, folder: Path, rounds: int) -> float:
    """Return steps/s while a save is persisted over steps/s without one, on all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    loop, parts = Loop(4, 512), training.parts()
    checkpointer = open_quietly(folder / "speed")
    checkpointer.resume({})
    ratios = []
    for step in range(1, rounds + 2):
        training.change()
        before = _steps_per_second(loop, _for_seconds(UNDISTURBED_SECONDS))
        checkpointer.save(step, parts, About())
        while_persisting = _steps_per_second(loop, _while_persisting(folder / "speed", step))
        checkpointer.wait()
        after = _steps_per_second(loop, _for_seconds(UNDISTURBED_SECONDS))
        ratios.append(2 * while_persisting / (before + after))
    checkpointer.close()
    torch.set_num_threads(threads)
    return round(median(ratios[1:]), 4)


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
