"""One rank on one of several hosts: ``python host_trainer.py FOLDER HOSTS STEPS DOOMED``.

HOSTS names the host of each rank, as ``a,a,b,b``; a host's near tier is ``FOLDER/near-HOST``, and
the durable one ``FOLDER/durable``. The ranks of the host DOOMED die by SIGKILL once step 5 is
saved. The others train to the end and print the step that they resumed from and a digest of all
their state.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch

from resilient.checkpoint.promotion_policy import TieringOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.distributed.launch_env import read_launch
from resilient.distributed.torch_kv_store import connect
from resilient.engine_factory import open_engine
from resilient.state_dict.optimizer import NamedOptimizer
from resilient.state_dict.snapshot import Part

DIES_AT = 5
PROMOTED_AT = 3


def main(folder: str, hosts: str, steps: str, doomed: str) -> None:
    launch = read_launch(os.environ)
    host = hosts.split(",")[launch.world.rank]
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parts = {"model": Part(model), "optimizer": Part(NamedOptimizer(model, optimizer))}
    # Kept: the others' place ends with it.
    board = connect(launch.world, launch.host, launch.port, hosted=False)
    checkpointer = open_engine(
        str(Path(folder, "durable")),
        launch.world,
        board,
        near_url=str(Path(folder, f"near-{host}")),
        tiering=TieringOptions(durable_every=PROMOTED_AT),
        within_seconds=60.0,
    )
    resumed = checkpointer.resume(parts)
    began = resumed.step if resumed else 0
    for step in range(began + 1, int(steps) + 1):
        model(torch.ones(200) * step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(step, parts, CheckpointInfo())
        checkpointer.wait(in_every_tier=step == PROMOTED_AT)
        if step == DIES_AT and host == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    state = [model.weight, optimizer.state[model.weight]["momentum_buffer"]]
    bits = b"".join(one.detach().numpy().tobytes() for one in state)
    for rank in range(launch.world.size):
        # Rank 0 serves the board, so it leaves last.
        key = f"farewell/{rank}"
        if rank == launch.world.rank:
            board.post(key, b"")
        elif launch.world.is_coordinator:
            board.wait([key], 60.0)
    sys.stdout.write(f"{began} {hashlib.sha256(bits).hexdigest()}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
