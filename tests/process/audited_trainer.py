"""A training that writes down what it really trains on, and dies where a plan says so.

``plan.json`` in the output folder lists deaths: [step, rank]. Each happens once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from resilient import Trainer, TrainerCallback, TrainingArguments

SAMPLES = 203


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        return {"x": torch.tensor([index / SAMPLES]), "labels": torch.tensor(index % 2)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.head(x), labels)}


class Recording(Trainer):
    """Remembers the samples of the step that is made."""

    trained: list[int]

    def training_step(self, model, inputs, *args):
        self.trained += (inputs["x"].double() * SAMPLES).round().long().flatten().tolist()
        return super().training_step(model, inputs, *args)


class Fate(TrainerCallback):
    """A line per step, and death."""

    def __init__(self, folder: Path, trainer_of) -> None:
        self.rank = int(os.environ["RANK"])
        self._path = folder / f"trained-{self.rank}.jsonl"
        self._folder, self._trainer_of = folder, trainer_of
        self._deaths = json.loads((folder / "plan.json").read_text())

    def on_step_end(self, args, state, control, **kwargs):
        trainer = self._trainer_of()
        generation = trainer._emit.context["generation"]
        line = {"generation": generation, "step": state.global_step, "trained": trainer.trained}
        trainer.trained = []
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for number, death in enumerate(self._deaths):
            mark = self._folder / f"death-{number}"
            if death == [state.global_step, self.rank] and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        logging_steps=5,
        disable_tqdm=True,
        use_cpu=True,
    )
    fate = Fate(folder, lambda: trainer)
    trainer = Recording(Model(), args, train_dataset=Numbers(), callbacks=[fate])
    trainer.trained = []
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
