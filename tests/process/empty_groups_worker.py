"""One rank of two: a loop whose optimizer has empty groups, unbroken and resumed.

python empty_groups_worker.py FOLDER
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

KINDS = {
    "ddp": DistributedDataParallel,
    "fsdp": fully_shard,
    "fsdp1": lambda model: FullyShardedDataParallel(
        model, device_mesh=init_device_mesh("cpu", (2,)), device_id=torch.device("cpu")
    ),
}


def run(kind: str, repository: Path, steps: int):
    """Train to a step, and return the step that was resumed and the weights of this rank."""
    torch.manual_seed(3)
    model = KINDS[kind](nn.Linear(4, 4))
    groups = [{"params": []}, {"params": [*model.parameters()]}, {"params": [], "lr": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with Checkpointer(repository, model=model, optimizer=optimizer) as checkpointer:
        resumed = checkpointer.resume()
        for step in range((resumed or 0) + 1, steps + 1):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step))).square().mean().backward()
            optimizer.step()
            checkpointer.save(step)
    held = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    return resumed, [one.detach().clone() for one in held]


def main(folder: Path) -> None:
    """Compare each kind of parallelism with its unbroken run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for kind in KINDS:
        _, whole = run(kind, folder / f"{kind}-whole", 4)
        run(kind, folder / f"{kind}-parts", 2)
        resumed, parts = run(kind, folder / f"{kind}-parts", 4)
        is_same = all(map(torch.equal, whole, parts))
        found[kind] = {"resumed": resumed, "same": is_same}
    sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
