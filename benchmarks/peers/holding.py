"""Script of each rank of the `everystep` benchmark: the demo's model with and without step cache.

    holding.py FOLDER BLOCKS STEPS

In one training, blocks of STEPS steps with and without `memory=1step` alternate. The first rank
writes the time of each step, from its beginning to the beginning of the next one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.gpt import Gpt, Windows
from resilient import Trainer, TrainerCallback, TrainingArguments

LENGTH = 64
TEXT_BYTES = 1 << 20
SAVES = "100000steps"


class Turns(TrainerCallback):
    """Callback that switches the step cache on and off, and records step times."""

    def __init__(self, path: Path, steps: int) -> None:
        self._path, self._steps = path, steps
        self._taken: list[dict[str, Any]] = []
        self._began_seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Record the previous step, which has ended with all its work, and begin the next."""
        now_seconds = time.perf_counter()
        if self._began_seconds:
            is_held = "memory" in args.save_every
            record = {"held": is_held, "seconds": now_seconds - self._began_seconds}
            self._taken.append({**record, "block": (state.global_step - 1) // self._steps})
        is_held = state.global_step // self._steps % 2
        args.save_every = f"{SAVES},memory=1step" if is_held else SAVES
        self._began_seconds = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write the recorded times."""
        if os.environ["RANK"] == "0":
            self._path.write_text(json.dumps(self._taken), encoding="utf-8")


def main(folder: Path, blocks: int, steps: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = Random(0).randbytes(TEXT_BYTES)  # noqa: S311 - the same for all ranks
    arguments = TrainingArguments(
        output_dir=str(folder / "output"), max_steps=blocks * steps, per_device_train_batch_size=8,
        learning_rate=1e-3, weight_decay=0.1, logging_steps=100_000, save_every=SAVES,
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    turns = Turns(folder / "steps.json", steps)
    Trainer(
        model=Gpt(LENGTH), args=arguments, train_dataset=Windows(text, LENGTH), callbacks=[turns]
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
