"""A trainer with two tiers: ``python tiered_trainer.py NEAR DURABLE STEPS WHERE``.

With ``promoting`` for WHERE it dies by SIGKILL in the middle of promoting step 4: when the first
of its files is in the durable tier and the manifest is not. Else it trains to the end, and prints
the step that it resumed from and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading

import torch

from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.engine_factory import open_engine
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore

put = LocalStore.put
reached = threading.Event()


def put_and_stop(self: LocalStore, key: str, data: memoryview) -> None:
    """Put a file, and never come back from the first of step 4 in the durable tier."""
    put(self, key, data)
    if "durable" in self.url and key.startswith("checkpoint-4-"):
        reached.set()
        threading.Event().wait()


def main(near: str, durable: str, steps: str, where: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parts = {"model": Part(model), "optimizer": Part(NamedOptimizer(model, optimizer))}
    if where == "promoting":
        LocalStore.put = put_and_stop
    checkpointer = open_engine(durable, near_url=near, tiering=TieringOptions(durable_every=2))
    resumed = checkpointer.resume(parts)
    began = resumed.step if resumed else 0
    for step in range(began + 1, int(steps) + 1):
        model(torch.ones(200) * step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(step, parts, CheckpointInfo())
        checkpointer.wait()
        if where == "promoting" and step == 5:
            reached.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    weights = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
    sys.stdout.write(f"{began} {weights}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
