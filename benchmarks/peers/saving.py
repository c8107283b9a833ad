"""Saves of one training state by all contenders, each as its own documentation recommends.

Each contender has two figures: ``stall``, the time that training waits, and ``durable``, the time
until every byte is synced. If a contender does not sync its files, the benchmark does it.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.harness import installed
from benchmarks.peers.rounds import Contender, Figures, Maker, timed
from benchmarks.peers.trainers import Accelerated, Transformed
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import CheckpointCommitted, Emitter, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from benchmarks.peers.training import Training

WRITE_BYTES = 16 << 20
MEMCPY_BYTES_MAX = 1 << 30


def makers(training: Training, folder: Path) -> dict[str, Maker]:
    """Return the makers of the contenders on this machine, by name."""
    found: dict[str, Maker] = {
        "memcpy": lambda: memcpy_of(training),
        "raw": lambda: partial(raw, training),
        "ours": lambda: ours_of(training, folder / "ours"),
        "torch_save": lambda: synchronous(partial(torch_save, training)),
        "dcp": lambda: synchronous(partial(dcp_save, training)),
    }
    if installed("safetensors"):
        found["safetensors"] = lambda: synchronous(partial(safetensors, training))
    if installed("accelerate"):
        found["accelerate"] = lambda: synchronous(Accelerated(training).save)
    if installed("transformers"):
        found["hf"] = lambda: synchronous(Transformed(training, folder).save)
    # These come last: one of them needs a process group, which must not affect the others.
    for kind in AsyncCheckpointerType:
        found[f"dcp_async_{kind.value}"] = partial(dcp_async_of, training, kind)
    return found


def synchronous(work: Callable[[Path], None]) -> Contender:
    """Return a save during which training waits; the sync comes after it."""

    def save(place: Path) -> Figures:
        stall = timed(lambda: work(place))
        return {"stall": stall, "durable": stall + timed(lambda: sync(place))}

    return save


def sync(place: Path) -> None:
    """Sync all files and folders of a folder."""
    for path in (*place.rglob("*"), place):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def memcpy_of(training: Training) -> Contender:
    """Copy all tensors, one after the other, into a buffer that was touched before.

    A large state wraps around in the buffer: only the presence of the pages matters.
    """
    tensors = training.tensors().values()
    largest = max(tensor.nbytes for tensor in tensors)
    buffer = torch.ones(max(min(training.size_bytes, MEMCPY_BYTES_MAX), largest), dtype=torch.uint8)

    def copy() -> None:
        at = 0
        for tensor in training.tensors().values():
            at = at if at + tensor.nbytes <= len(buffer) else 0
            buffer[at : at + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            at += tensor.nbytes

    return lambda _: {"stall": timed(copy)}


def raw(training: Training, place: Path) -> Figures:
    """Write the same bytes to one file in one stream, and sync it."""

    def write() -> None:
        with (place / "raw").open("wb", buffering=0) as file:
            for tensor in training.tensors().values():
                view = tensor.numpy().reshape(-1).view("u1").data
                for start in range(0, len(view), WRITE_BYTES):
                    file.write(view[start : start + WRITE_BYTES])
            os.fsync(file.fileno())

    return {"durable": timed(write)}


def ours_of(training: Training, folder: Path) -> Contender:
    """Save with an engine that keeps one checkpoint."""
    committed: list[float] = []

    def listen(_record: Mapping[str, object], event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            committed.append(event.commit_seconds)

    emit = Emitter(SystemClock(), (listen,))
    checkpointer = open_engine(str(folder), emit=emit, keep_last=1)
    parts = training.parts()
    checkpointer.resume(parts)
    step = 0

    def save(_: Path) -> Figures:
        nonlocal step
        step += 1
        training.change()
        stall = timed(lambda: checkpointer.save(step, parts, CheckpointInfo()))
        # `durable` ends when the manifest is in the store. Retention runs after that.
        checkpointer.wait()
        return {"stall": stall, "durable": committed[-1]}

    return save


def torch_save(training: Training, place: Path) -> None:
    """Save both states to one file with ``torch.save``."""
    torch.save(training.nested(), place / "state.pt")


def safetensors(training: Training, place: Path) -> None:
    """Save with safetensors' own writer, which takes only tensors."""
    from safetensors.torch import save_file

    save_file(dict(training.tensors()), place / "state.safetensors")


def dcp_save(training: Training, place: Path) -> None:
    """Save with torch.distributed.checkpoint: two threads are its fastest on a local disk."""
    writer = dcp.FileSystemWriter(place, thread_count=2)
    dcp.save(dict(training.tensors()), storage_writer=writer, no_dist=True)


def dcp_stager() -> DefaultStager:
    """Return DCP's best stager: reused shared memory, and copies in the background."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=False,
        )
    )


def dcp_begin(
    kind: AsyncCheckpointerType, stager: DefaultStager
) -> Callable[[Mapping[str, torch.Tensor], Path], AsyncSaveResponse]:
    """Return a function that begins an asynchronous save of tensors."""
    in_process = kind is AsyncCheckpointerType.PROCESS
    if in_process and not dist.is_initialized():
        # DCP's daemon needs a process group; its thread does not.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def begin(tensors: Mapping[str, torch.Tensor], place: Path) -> AsyncSaveResponse:
        response = dcp.async_save(
            dict(tensors),
            storage_writer=dcp.FileSystemWriter(place, thread_count=2),
            async_checkpointer_type=kind,
            async_stager=stager,
            no_dist=not in_process,
        )
        assert isinstance(response, AsyncSaveResponse)
        return response

    return begin


def dcp_async_of(training: Training, kind: AsyncCheckpointerType) -> Contender:
    """Measure DCP's call alone, which does not tell when the state may change."""
    begin = dcp_begin(kind, dcp_stager())

    def save(place: Path) -> Figures:
        began = time.perf_counter()
        response = begin(training.tensors(), place)
        stall = time.perf_counter() - began
        response.upload_completion.result()
        return {"stall": stall, "durable": time.perf_counter() - began}

    return save
