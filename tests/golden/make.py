"""Write the golden repository of the present format version: python tests/golden/make.py FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.events import Emitter
from resilient.format.manifest import FORMAT_VERSION
from resilient.state_dict.snapshot import Part
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import run_ranks


class Held:
    """A Stateful that holds what it is given."""

    def __init__(self, state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


def golden_state(step: int, rank: int, version: int) -> dict[str, Part]:
    """Return state with one of each kind of value that the format's version knows."""
    weight = torch.arange(70000, dtype=torch.float32).reshape(700, 100) * step
    model = {"wte.weight": weight, "lm_head.weight": weight, "half": weight[0].bfloat16()}
    if version > 1:
        # The second checkpoint refers to the first one's file.
        model["frozen"] = torch.arange(35000, dtype=torch.float32)
    odd = {
        "tuple": (1, "two", None),
        "numbers": {1: float("inf"), -2: 3.5},
        "bytes": b"\x00\xff",
        "scalar": torch.tensor(step),
        "empty": torch.empty(0, 4),
    }
    return {
        "model": Part(Held(model)),
        "odd": Part(Held(odd)),
        "trainer_state": Part(Held({"global_step": step}), document="trainer_state.json"),
        "rng_state": Part(Held({"words": torch.arange(5) + rank}), "rank"),
    }


def main(folder: str) -> None:
    """Save two checkpoints with two ranks."""
    store = LocalStore(Path(folder))

    def rank_main(world, board):
        comms = ControlGroup(board, world, "golden")
        desk = CheckpointContext(
            store, comms, CheckpointOptions(), SystemClock(), Emitter(SystemClock())
        )
        checkpointer = CheckpointEngine(desk)
        checkpointer.resume({})
        for step in (1, 2):
            about = CheckpointInfo(
                {"learning_rate": 0.001}, {"epoch": 0, "samples": 64 * step}, "ddp"
            )
            state = golden_state(step, world.rank, FORMAT_VERSION)
            checkpointer.save(step, state, about)
        checkpointer.close()

    run_ranks(2, rank_main)


if __name__ == "__main__":
    main(sys.argv[1])
