"""How long training waits for a save and how soon it is durable, against raw copies and peers.

One process, local disk, a state of AdamW (parameters and two moments, fp32). Per round and
contender: `stall` is how long the training thread waits, `durable` how long until the bytes are
synced. `keeper` is ours with a keeper process; `overlap` is ours with overlap, where training
makes a forward and backward pass in between. `memcpy` copies the same bytes into a warm buffer,
`raw` writes them in one sequential stream and syncs. `MEGAPARAMS` in the environment sets the
size, 30 million by default.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.harness import Report, installed
from benchmarks.stalls import keeper_of, overlap_of, training_speed_while_persisting
from resilient.checkpointer import About
from resilient.clock import SystemClock
from resilient.events import CheckpointCommitted, Emitter, Event
from resilient.opening import open_checkpointer
from resilient.state.capture import Part

ROUNDS = 5
TENSOR_BYTES = 16 << 20
Figures = dict[str, float]
Contender = Callable[[Path], Figures]


class State:
    """Parameters and moments, as a Stateful of flat tensors."""

    def __init__(self, parameters: int) -> None:
        count = max(parameters * 4 // TENSOR_BYTES, 1)
        rows = parameters // count // 1024
        self.tensors = {
            f"{kind}.{number}": torch.randn(rows, 1024)
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for number in range(count)
        }
        self.size_bytes = sum(one.nbytes for one in self.tensors.values())

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors."""
        return self.tensors

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors back."""
        for name, one in state_dict.items():
            self.tensors[name].copy_(one)


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    state = State(int(os.environ.get("MEGAPARAMS", "30")) * 1_000_000)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        contenders = make_contenders(state, Path(folder))
        order = random.Random(0)  # noqa: S311 - only the order depends on it
        found: list[Figures] = []
        for number in range(rounds + 1):
            names = list(contenders)
            order.shuffle(names)
            figures: Figures = {}
            for name in names:
                place = Path(folder) / f"{name}-{number}"
                place.mkdir()
                measured = contenders[name](place)
                figures |= {f"{name}_{what}": value for what, value in measured.items()}
                shutil.rmtree(place)
            found.append(figures)
        speed = training_speed_while_persisting(state, Path(folder), rounds)
    # The first round warmed the buffers.
    return report(found[1:], state.size_bytes, training_speed_while_persisting=speed)


def report(found: list[Figures], size_bytes: int, **measured: float) -> Report:
    """Return the ratios of a run."""

    def ratio(one: str, other: str) -> float:
        return round(median(figures[one] / figures[other] for figures in found), 4)

    stalls = [name for name in found[0] if name.endswith("_stall")]
    durable = [name for name in found[0] if name.endswith("_durable") and name != "raw_durable"]
    ratios = {"stall_over_memcpy": ratio("ours_stall", "memcpy_stall")}
    ratios |= {f"{name}_over_memcpy": ratio(name, "memcpy_stall") for name in stalls}
    ratios["durable_throughput_over_raw"] = ratio("raw_durable", "ours_durable")
    ratios |= {
        f"{name.removesuffix('_durable')}_throughput_over_raw": ratio("raw_durable", name)
        for name in durable
    }
    ratios |= measured
    middle = {f"{name}_seconds": round(median(one[name] for one in found), 4) for name in found[0]}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    notes = {"rounds": len(found), "state_mib": size_bytes >> 20, "peak_memory_mib": peak}
    return Report("save", ratios, {**notes, **middle})


def make_contenders(state: State, folder: Path) -> dict[str, Contender]:
    """Return what is measured, by name."""
    contenders: dict[str, Contender] = {
        "memcpy": memcpy_of(state),
        "raw": raw_of(state),
        "ours": ours_of(state, folder / "ours"),
        "torch_save": lambda place: synchronous(lambda: torch_save(state, place)),
        "dcp": lambda place: synchronous(lambda: dcp_save(state, place)),
        "dcp_async": dcp_async_of(state),
        "keeper": keeper_of(state, folder / "keeper"),
        "overlap": overlap_of(state.size_bytes, folder / "overlap"),
    }
    if installed("safetensors"):
        contenders["safetensors"] = lambda place: synchronous(lambda: safetensors(state, place))
    return contenders


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` took."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def synchronous(work: Callable[[], object]) -> Figures:
    """Return the figures of a save during which training waits for everything."""
    took = timed(work)
    return {"stall": took, "durable": took}


def memcpy_of(state: State) -> Contender:
    """Copy all tensors into a buffer that was touched before."""
    buffers = {name: torch.empty_like(one).fill_(1) for name, one in state.tensors.items()}

    def copy() -> None:
        for name, one in state.tensors.items():
            buffers[name].copy_(one)

    return lambda _: {"stall": timed(copy)}


def raw_of(state: State) -> Contender:
    """Write the same bytes as one file, in 16 MiB pieces, and sync it."""

    def write(place: Path) -> None:
        with (place / "raw").open("wb", buffering=0) as file:
            for one in state.tensors.values():
                file.write(one.numpy().data.cast("B"))
            os.fsync(file.fileno())

    return lambda place: {"durable": timed(lambda: write(place))}


def ours_of(state: State, folder: Path) -> Contender:
    """Save with a Checkpointer that keeps one checkpoint."""
    committed: list[float] = []

    def listen(_record: Mapping[str, object], event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            committed.append(event.commit_seconds)

    emit = Emitter(SystemClock(), (listen,))
    checkpointer = open_checkpointer(str(folder), emit=emit, keep_last=1)
    parts = {"model": Part(state)}
    checkpointer.resume(parts)
    step = 0

    def save(_: Path) -> Figures:
        nonlocal step
        step += 1
        began = time.perf_counter()
        checkpointer.save(step, parts, About())
        stall = time.perf_counter() - began
        # The manifest is in the store; deleting the checkpoint before this one comes after that.
        checkpointer.wait()
        return {"stall": stall, "durable": committed[-1]}

    return save


def torch_save(state: State, place: Path) -> None:
    """``torch.save`` to a file, synced."""
    with (place / "state.pt").open("wb") as file:
        torch.save(state.tensors, file)
        file.flush()
        os.fsync(file.fileno())


def safetensors(state: State, place: Path) -> None:
    """Safetensors' own writer, synced afterwards."""
    from safetensors.torch import save_file

    save_file(state.tensors, place / "state.safetensors")
    with (place / "state.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def dcp_save(state: State, place: Path) -> None:
    """torch.distributed.checkpoint with two threads, its fastest setting on a local disk."""
    writer = dcp.FileSystemWriter(place, thread_count=2)
    dcp.save(dict(state.tensors), storage_writer=writer, no_dist=True)


def dcp_async_of(state: State) -> Contender:
    """DCP's best: a thread, a reused stager in shared memory, staging in the background too."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
    )

    def save(place: Path) -> Figures:
        began = time.perf_counter()
        writer = dcp.FileSystemWriter(place, thread_count=2)
        response = dcp.async_save(
            dict(state.tensors), storage_writer=writer, no_dist=True, async_stager=stager
        )
        stall = time.perf_counter() - began
        upload = getattr(response, "upload_completion", response)
        upload.result()
        return {"stall": stall, "durable": time.perf_counter() - began}

    return save
