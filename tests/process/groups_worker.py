"""Ranks as forks that make the groups of every kind of mesh, and tell how long those wait."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from resilient.strategies.fsdp import data_mesh
from resilient.strategies.fsdp_options import FsdpOptions
from resilient.strategies.parallelism_options import MeshSizes
from resilient.strategies.pipeline.strategy import PipelineStrategy
from resilient.strategies.tensor_parallel import TensorParallelStrategy

RANKS = 4
CPU = torch.device("cpu")


def seconds_of(groups):
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def waits(mesh):
    return seconds_of(mesh.get_all_groups())


def measure():
    place, mesh = PipelineStrategy(CPU, MeshSizes(1, 2, 1, 2), None)._create_groups()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    TensorParallelStrategy(CPU, MeshSizes(1, 2, 2), {"0": "colwise"}).prepare(model)
    return {
        "pipeline": seconds_of([place.pipeline_group, place.peers_group]),
        "pipeline_mesh": waits(mesh),
        "tensor_parallel": waits(model[0].weight.device_mesh),
        "hybrid_shard": waits(data_mesh(CPU, FsdpOptions(hybrid=True, shard_size=2))),
    }


def main(folder, seconds):
    ranks = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            store = dist.FileStore(str(folder / "store"), RANKS)
            limit = timedelta(seconds=seconds)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
            (folder / f"waits-{rank}.json").write_text(json.dumps(measure()))
            dist.destroy_process_group()
            return 0
        ranks.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
