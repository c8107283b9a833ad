"""A trainer that kills itself: ``python dying_trainer.py KEEPER REPOSITORY WHERE``.

It saves step 1, which becomes durable, then step 2, and dies by SIGKILL at WHERE of it:
``saved`` when save() returned, ``copying`` while the copy is being made beside training,
``updating`` when before_update() returned.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch

from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.engine_factory import open_engine
from resilient.state_dict.host_copy import HostCopyBatch
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part

begun = threading.Event()
make = HostCopyBatch.make


def make_and_stop(self: HostCopyBatch, *, modestly: bool = False) -> None:
    """Make the copies of one file and never begin another."""
    make(self, modestly=modestly)
    begun.set()
    threading.Event().wait()


def main(keeper: str, repository: str, where: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 400, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = {"model": Part(model), "optimizer": Part(NamedOptimizer(model, optimizer))}
    checkpointer = open_engine(repository, keeper=DaemonAddress(keeper))
    checkpointer.resume(parts)
    for step in (1, 2):
        model(torch.ones(400)).sum().backward()
        checkpointer.before_update()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            checkpointer.save(step, parts, CheckpointInfo(), overlap=True)
            checkpointer.wait()
    torch.save(model.weight.detach(), Path(keeper).with_name("weight"))
    if where == "copying":
        HostCopyBatch.make = make_and_stop
    checkpointer.save(2, parts, CheckpointInfo(), overlap=where != "saved")
    if where == "copying":
        begun.wait()
    if where == "updating":
        checkpointer.before_update()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
