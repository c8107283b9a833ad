"""One rank of trainings whose labels are spread unevenly over samples, ranks and micro-batches.

python loss_worker.py OUT BATCH
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from resilient import Trainer, TrainingArguments
from tests.unit.train.token_models import Mean, Sentences, Tagger

torch.set_num_threads(1)
WAYS = {
    "over ranks": (Tagger, {}),
    "smoothed": (Mean, {"label_smoothing_factor": 0.2}),
    "on each rank": (
        Tagger,
        {"average_tokens_across_devices": False, "include_num_input_tokens_seen": "all"},
    ),
}


def train(folder, way, batch, accumulation):
    """Return the weights after two epochs, and the losses."""
    kind, options = WAYS[way]
    arguments = TrainingArguments(
        output_dir=str(folder / way.replace(" ", "-")),
        use_cpu=True,
        optim="sgd",
        learning_rate=0.7,
        num_train_epochs=2,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Trainer(kind(), arguments, train_dataset=Sentences(20))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens = trainer.state.num_input_tokens_seen
    return {"model": trainer.model.state_dict(), "losses": losses, "tokens": tokens}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    made = {way: train(out, way, 2, 2) for way in WAYS}
    rank = TrainingArguments().process_index
    torch.save(made, out / f"result-{rank}.pt")
