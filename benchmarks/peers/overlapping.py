"""DCP's asynchronous saves in the loop that measures our saves with overlap.

The loop makes a pass, waits for the copy, and then makes the step. DCP's call returns while its
thread still copies, and does not tell when the state may change. A loop that continues with its
optimizer's step stores a mixture of two steps, which ``torn_share`` shows. So a loop that needs a
checkpoint of one moment waits for the copy before the step, as ours does. The stall is the sum of
all waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.peers.saving import dcp_begin, dcp_stager

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    from benchmarks.peers.rounds import Contender, Figures
    from benchmarks.peers.training import Training
    from benchmarks.stalls import Loop


def dcp_overlap_of(loop: Loop, size_bytes: int, kind: AsyncCheckpointerType) -> Contender:
    """Save with DCP; the stall is the whole wait of training, scaled to ``size_bytes``."""
    begin = dcp_begin(kind, dcp_stager())

    def save(place: Path) -> Figures:
        loop.settle()
        began = time.perf_counter()
        response = begin(loop.tensors(), place)
        saved = time.perf_counter()
        loop.forward_backward()
        passed = time.perf_counter()
        response.staging_completion.result()
        stall = saved - began + time.perf_counter() - passed
        loop.update()
        response.upload_completion.result()
        durable = time.perf_counter() - began
        scale = size_bytes / loop.size_bytes
        return {
            "stall": stall * scale,
            "call": (saved - began) * scale,
            "durable": durable * scale,
            "pass": passed - saved,
        }

    return save


def torn_share(training: Training, place: Path, kind: AsyncCheckpointerType) -> float:
    """Return the share of stored bytes that belong to the step after the saved one.

    The loop continues as soon as ``async_save`` returns, which is all that DCP documents.
    """
    begin = dcp_begin(kind, dcp_stager())
    tensors = {name: tensor for name, tensor in training.tensors().items() if tensor.dim()}
    # The first save of a stager allocates its memory. Training sees only the later ones.
    for number in range(2):
        for tensor in tensors.values():
            tensor.fill_(0)
        response = begin(tensors, place / str(number))
        for tensor in tensors.values():
            tensor.fill_(1)
        response.staging_completion.result()
        response.upload_completion.result()
    stored = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    dcp.load(stored, storage_reader=dcp.FileSystemReader(place / "1"), no_dist=True)
    later = sum(float(tensor.sum(dtype=torch.float64)) for tensor in stored.values())
    return round(later / sum(tensor.numel() for tensor in stored.values()), 4)
