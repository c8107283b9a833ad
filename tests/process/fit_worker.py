"""One rank of two trainings: one that finds its batch size, and one that is told it.

python fit_worker.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from resilient import Trainer, TrainingArguments
from tests.unit.train.models import Net, Noisy

torch.set_num_threads(1)
RANK = TrainingArguments().process_index
# More than any machine has.
ABSURD_BYTES = 1 << 60


class TightOnOne(Net):
    """Rank 1 alone has no memory for more than four samples, in the second pass of a step."""

    passes = 0

    def forward(self, x, labels=None):
        self.passes += 1
        made = super().forward(x, labels)
        if RANK == 1 and len(x) > 4 and self.passes > 1:
            torch.empty(ABSURD_BYTES, dtype=torch.uint8)
        return made


class Remembers(Trainer):
    """Knows which samples it has trained on since memory ran out."""

    seen: list[int]

    def training_step(self, model, inputs):
        index = inputs.pop("index").tolist()
        loss = super().training_step(model, inputs)
        self.seen += index if len(index) == 4 else []
        return loss


class Indexed(Noisy):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index}


def train(folder, model, batch, **options):
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        learning_rate=0.05,
        num_train_epochs=2,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Remembers(model, arguments, train_dataset=Indexed(48))
    trainer.seen = []
    trainer.train()
    return {
        "model": trainer.model.state_dict(),
        "history": trainer.state.log_history,
        "batch": trainer.state.train_batch_size,
        "seen": trainer.seen,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    found = train(out / "found", TightOnOne(), 8, auto_find_batch_size=True)
    told = train(out / "told", Net(), 4)
    torch.save({"found": found, "told": told}, out / f"result-{RANK}.pt")
