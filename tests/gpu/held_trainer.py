"""A training on the GPU: ``python held_trainer.py FOLDER OPTIMIZER STEPS DIES_AT``.

Dropout draws from the device's generator at each step. In its first life it kills itself with
SIGKILL at the end of a step; 0 is never. It writes its pid and how far it came to ``steps.txt``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from random import Random

import torch

from examples.gpt import Gpt, Windows
from resilient import Trainer, TrainerCallback, TrainingArguments

LENGTH = 64


class Dies(TrainerCallback):
    """Notes each step, and ends the first life."""

    def __init__(self, folder: Path, dies_at: int) -> None:
        self._steps = folder / "steps.txt"
        self._dies_at = dies_at

    def on_step_begin(self, args, state, control, **kwargs):
        if self._dies_at and state.global_step == self._dies_at:
            pids = {line.split()[0] for line in self._steps.read_text().splitlines()}
            if pids == {str(os.getpid())}:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        with self._steps.open("a") as file:
            file.write(f"{os.getpid()} {state.global_step}\n")


def main(folder: Path, optimizer: str, steps: int, dies_at: int) -> None:
    torch.manual_seed(0)
    text = Random(0).randbytes(1 << 18)
    arguments = TrainingArguments(
        output_dir=str(folder / "output"), max_steps=steps, per_device_train_batch_size=8,
        learning_rate=1e-3, weight_decay=0.1, optim=optimizer, max_grad_norm=1.0,
        logging_steps=5, save_strategy="steps", save_steps=10, disable_tqdm=True,
        full_determinism=True, bf16=optimizer.endswith("fused"),
    )  # fmt: skip
    Trainer(
        model=Gpt(LENGTH, dropout=0.2),
        args=arguments,
        train_dataset=Windows(text, LENGTH),
        callbacks=[Dies(folder, dies_at)],
    ).train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
