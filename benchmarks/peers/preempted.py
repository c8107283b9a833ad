"""Training script that records its current phase, so that a test can preempt a chosen phase.

``benchmarks.preemptions`` and the tests run it. ``phase-<rank>`` in the folder contains one word,
and ``steps-<rank>`` one line per finished step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

RANK = os.environ.get("RANK", "0")
PHASES = ("start-up", "loading", "forward", "backward", "evaluation", "saving")
_WIDTH = 16


class Diary:
    """Record of the phase of this rank; each phase is one small write, which readers see whole."""

    def __init__(self, folder: Path) -> None:
        self._phase = os.open(folder / f"phase-{RANK}", os.O_CREAT | os.O_WRONLY, 0o644)
        self._steps = os.open(
            folder / f"steps-{RANK}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644
        )

    def enter(self, phase: str, seconds: float = 0.0) -> None:
        """Record the start of a phase, and stay in it for ``seconds``."""
        os.pwrite(self._phase, phase.ljust(_WIDTH).encode(), 0)
        time.sleep(seconds)

    def finish(self, step: int) -> None:
        """Record a finished step."""
        os.write(self._steps, f"{step}\n".encode())


def main() -> None:
    """Train until stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    diary = Diary(options.folder)
    diary.enter("start-up")
    train(diary, options.folder, options.steps)


def train(diary: Diary, folder: Path, steps: int) -> None:
    """Train a small model slowly."""
    import torch
    from torch import nn

    from resilient import Trainer, TrainerCallback, TrainingArguments

    class Slow(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            diary.enter("loading", 0.01)
            x = torch.full((8,), float(index % 17))
            return {"x": x + torch.rand(8), "labels": torch.tensor(index % 3)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 3))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            diary.enter("forward" if self.training else "evaluation", 0.04)
            logits = self.layers(x)
            if logits.requires_grad:
                logits.register_hook(lambda _: diary.enter("backward", 0.04))
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    class Telling(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, /, **_: Any) -> None:
            diary.finish(state.global_step)

        def on_save(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
            diary.enter("saving", 0.05)

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=4,
        save_total_limit=2,
        logging_steps=1000,
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Slow()
    held_out = torch.utils.data.Subset(data, range(96))
    Trainer(
        Model(), arguments, train_dataset=data, eval_dataset=held_out, callbacks=[Telling()]
    ).train()


if __name__ == "__main__":
    main()
