"""One of two ranks: train with the loop's checkpointer in every layout, break off, and go on.

python loop_worker.py FOLDER

Prints one line of JSON per layout: its name, and what differs from the run that was not broken.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from resilient import Checkpointer
from resilient.clock import SystemClock
from resilient.events import Emitter


def shard(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def flatten(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"))


LAYOUTS = {
    "ddp": DistributedDataParallel,
    "ddp-own-buffers": lambda model: DistributedDataParallel(model, broadcast_buffers=False),
    "ddp-compiled": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "fsdp": shard,
    "flat": flatten,
}


class Job:
    """Statistics that differ by rank, random state, and samples of each rank's own."""

    def __init__(self, layout, seed) -> None:
        torch.manual_seed(seed)
        inside = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 1))
        self.model = LAYOUTS[layout](inside)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.inside = inside
        torch.manual_seed(seed + dist.get_rank())

    def train(self, steps):
        for _ in range(steps):
            self.model(torch.rand(5, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def bits(self):
        whole = {n: full(one) for n, one in self.model.state_dict().items()}
        return {name: one.detach().numpy().tobytes() for name, one in whole.items()}


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def broken(layout, folder):
    """Save in the middle, go on, and go on again from what was saved."""
    emit = Emitter(SystemClock())
    first = Job(layout, seed=1)
    with Checkpointer(folder, model=first.model, optimizer=first.optimizer, emit=emit) as one:
        assert one.resume() is None
        first.train(3)
        one.save(3)
        first.train(2)
    second = Job(layout, seed=2)
    with Checkpointer(folder, model=second.model, optimizer=second.optimizer, emit=emit) as one:
        assert one.resume() == 3
        second.train(2)
    expected, found = first.bits(), second.bits()
    assert expected.keys() == found.keys()
    return [name for name, bits in found.items() if bits != expected[name]]


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in LAYOUTS:
        wrong = broken(layout, folder / layout)
        strategy = json.loads((folder / layout / "checkpoint-3-g1/manifest.json").read_text())
        sys.stdout.write(json.dumps([layout, strategy["world"], wrong]) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
