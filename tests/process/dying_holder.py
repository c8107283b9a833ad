"""Holds one step after the other with a keeper until it is killed: ``KEEPER URL [CHILD_SECONDS]``.

A child that it forks lives on for so long. After each step it says which. Sizes change, so memory
and layouts do.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.in_memory_steps import start_step_cache
from tests.helpers.keepers import begin, weight

SIZES = (5, 9, 5, 40, 5, 9, 3000)


def nap(seconds: float) -> None:
    # Who reads what the rank says waits for its end, and not for ours.
    os.close(1)
    time.sleep(seconds)


def main() -> None:
    keeper = SimpleNamespace(path=Path(sys.argv[1]))
    checkpointer = begin(keeper, sys.argv[2])
    checkpointer.save(1, weight(1), CheckpointInfo())
    checkpointer.wait()
    holding = start_step_cache(checkpointer)
    if len(sys.argv) > 3:
        fork = multiprocessing.get_context("fork")
        fork.Process(target=nap, args=(float(sys.argv[3]),)).start()
    for step in range(2, 1_000_000):
        size = SIZES[step // 100 % len(SIZES)] + step % 3
        about = CheckpointInfo(config={"step": step // 7, "plan": [step]})
        holding.hold(step, weight(step, size), about, overlap=False)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
