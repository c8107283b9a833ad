"""One of two ranks, of which one alone calls ``save()``: python missed_saves_worker.py FOLDER MODE.

Modes: ``closes`` (the other rank ends its loop), ``trains`` (it goes on to train), ``barrier`` (it
waits at another collective), ``last`` (the last rank saves, and rank 0 does not).
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient import Checkpointer
from resilient.errors import SaveFailed


def main(folder: str, mode: str) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    saver = dist.get_world_size() - 1 if mode == "last" else 0
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(folder, model=model, optimizer=optimizer)
    checkpointer.resume()
    began = time.monotonic()
    try:
        for step in range(1, 9 if mode == "closes" else 100):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 8 and dist.get_rank() == saver:
                checkpointer.save(step)
            elif step == 8 and mode == "barrier":
                dist.barrier()
        checkpointer.close()
    except SaveFailed as error:
        took = time.monotonic() - began
        sys.stdout.write(f"FAILED {took:.0f} {error.message} | {error.hint}\n")
        sys.stdout.flush()
        os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
