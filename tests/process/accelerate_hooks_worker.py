"""One rank of two: rank 0 alone writes files in its save hook, and every rank reads them.

python accelerate_hooks_worker.py REPOSITORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from resilient.integrations.accelerate import AcceleratorCheckpointer


def main(repository: str) -> None:
    """Save and resume, and fail if a rank lacks a file."""
    accelerator = Accelerator(cpu=True)
    rank, read = accelerator.process_index, []
    accelerator.prepare(nn.Linear(2, 1))

    def save(models, weights, folder):
        if accelerator.is_main_process:
            (Path(folder) / "main.txt").write_text("main")
        (Path(folder) / f"rank-{rank}.txt").write_text(str(rank))

    def load(models, folder):
        read.append({one.name: one.read_text() for one in Path(folder).iterdir()})

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    for step in (None, 1):
        with AcceleratorCheckpointer(accelerator, repository) as checkpointer:
            assert checkpointer.resume() == step
            checkpointer.save((step or 0) + 1)
    assert read == [{"main.txt": "main", "rank-0.txt": "0", "rank-1.txt": "1"}], read
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
