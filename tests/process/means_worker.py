"""One of two ranks that add the losses of three steps, the second of them beside other work.

python means_worker.py FOLDER [near]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from resilient.distributed.host_sum import PAGE_BYTES, HostLocalSum
from resilient.storage.shared_memory import map_file
from resilient.train.meters import Meters

LATE_SECONDS = 0.5


def near_sums_of(folder, rank):
    """Return what adds up through two files, as through a keeper's memory."""
    pages = []
    for one in range(2):
        path = folder / f"page-{one}"
        if one == rank:
            fresh = path.with_suffix(".new")
            fresh.write_bytes(bytes(PAGE_BYTES))
            fresh.rename(path)
        while not path.exists():
            time.sleep(0.01)
        pages.append(map_file(path, PAGE_BYTES, writable=one == rank))
    return HostLocalSum(pages, rank)


def main(folder, is_near):
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    meters, steps, sign = Meters(torch.device("cpu"), 2), [], folder / "second-began"
    near = near_sums_of(folder, rank) if is_near else None
    for step in range(3):
        meters.add_loss(torch.tensor(0.1 * (step + 1) + 0.7 * rank))
        meters.add_loss(torch.tensor(1 / 3))
        if step == 1:
            if rank == 1:
                time.sleep(LATE_SECONDS)
                sign.touch()
            meters.begin_mean(near)
            was_alone = not sign.exists()
        steps.append(meters.take_step())
    [second] = meters.means(steps[1:2])
    said = {
        "was_alone": was_alone,
        "others_were_there": sign.exists(),
        "second": second,
        "means": meters.means(steps),
    }
    (folder / f"said-{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["near"])
