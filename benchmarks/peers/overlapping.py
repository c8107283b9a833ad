"""DCP's asynchronous saves as ours with overlap are measured: a pass, a wait for the copy, a step.

DCP's call returns while a thread of it copies, and says nothing of when the state may change. A
loop that goes on to its optimizer's step stores a mixture of two steps, which ``torn_share``
shows. So a loop that wants a checkpoint of one moment waits for the copy before the step, as ours
does, and the stall is what it waits in all.
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
    """Save by DCP; the stall is all that training waits, scaled to ``size_bytes``."""
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
    """Return the share of bytes that a save holds of the step after the one that was saved.

    The loop goes on as soon as ``async_save`` returns, which is all that its documentation asks.
    """
    begin = dcp_begin(kind, dcp_stager())
    tensors = {name: one for name, one in training.tensors().items() if one.dim()}
    # The first one of a stager makes its memory; what training sees are the others.
    for number in range(2):
        for one in tensors.values():
            one.fill_(0)
        response = begin(tensors, place / str(number))
        for one in tensors.values():
            one.fill_(1)
        response.staging_completion.result()
        response.upload_completion.result()
    stored = {name: torch.empty_like(one) for name, one in tensors.items()}
    dcp.load(stored, storage_reader=dcp.FileSystemReader(place / "1"), no_dist=True)
    later = sum(float(one.sum(dtype=torch.float64)) for one in stored.values())
    return round(later / sum(one.numel() for one in stored.values()), 4)
