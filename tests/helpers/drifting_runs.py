"""A run of ours whose two checkpoints differ in known places; nothing in it is computed."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import Emitter
from resilient.state_dict.statefuls import collect_parts


class Tiny(nn.Module):
    """Two layers; what the second computes with is kept in half the precision."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 2, bias=False).bfloat16()


def write_drifting_run(folder):
    """Save step 10, then step 20: other moments, some other weights, and random numbers drawn."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - it is a part of what is saved
    torch.manual_seed(5)
    model = Tiny()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    fill(model, optimizer, 10)
    log = [{"step": 10, "loss": 2.5}]
    objects = collect_parts({"model": model, "optimizer": optimizer, "log": log}, 1, rng=True)
    checkpointer = open_engine(str(folder), emit=Emitter(SystemClock()))
    checkpointer.resume({})
    about = CheckpointInfo(config={"seed": 5, "optim": {"lr": 0.5}}, data={"samples": 80})
    checkpointer.save(10, objects.parts, about)
    checkpointer.wait()
    fill(model, optimizer, 20)
    optimizer.param_groups[0]["lr"] = 0.25
    random.getrandbits(32)
    torch.rand(100)
    about = CheckpointInfo(config={"seed": 5, "optim": {"lr": 0.25}}, data={"samples": 160})
    checkpointer.save(20, objects.parts, about)
    checkpointer.close()


def fill(model, optimizer, step):
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            place = torch.arange(1, parameter.numel() + 1).view_as(parameter)
            parameter.copy_(place + (step / 64 if number else 0))
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": place * step / 64,
                "exp_avg_sq": torch.zeros_like(parameter),
            }
