"""A training small enough to be killed often: dropout, momentum, a schedule, shuffled data.

Every rank appends a line per finished step to ``steps-<rank>.jsonl`` in the output folder, so a
test can wait for a step before it sends a signal. The end state is in the last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from resilient import Trainer, TrainerCallback, TrainingArguments


class Bytes(torch.utils.data.Dataset):
    """Windows of this very file: predict the byte after the window."""

    def __init__(self) -> None:
        self._bytes = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return 601

    def __getitem__(self, index):
        return {
            "window": self._bytes[index : index + 8],
            "labels": self._bytes[index + 8],
            "index": torch.tensor(index),
        }


class Model(nn.Module):
    """Bytes in, loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(128, 256)

    def forward(self, window, labels):
        logits = self.head(self.drop(self.embed(window).flatten(1)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Seen:
    """The index of every sample this rank trained on, in order."""

    def __init__(self) -> None:
        self.indexes: list[int] = []

    def state_dict(self):
        return {"indexes": torch.tensor(self.indexes, dtype=torch.int64)}

    def load_state_dict(self, state) -> None:
        self.indexes = state["indexes"].tolist()


class Recording(Trainer):
    """Takes the index out of each batch and remembers it."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.seen = Seen()
        self.register("seen", self.seen, scope="rank")

    def training_step(self, model, inputs):
        self.seen.indexes += inputs.pop("index").tolist()
        return super().training_step(model, inputs)

    def prediction_step(self, model, inputs, *args, **kwargs):
        inputs.pop("index")
        return super().prediction_step(model, inputs, *args, **kwargs)


class Diary(TrainerCallback):
    """One line per step, written at once; and a pause, so that signals find a step to hit."""

    def __init__(self, folder: Path, pause_seconds: float, die_at: int = 0) -> None:
        self._path = folder / f"steps-{os.environ.get('RANK', '0')}.jsonl"
        self._pause_seconds = pause_seconds
        self._die_at = die_at

    def on_step_end(self, args, state, control, **kwargs):
        with self._path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, "pid": os.getpid()}) + "\n")
        time.sleep(self._pause_seconds)
        if state.global_step == self._die_at:
            raise RuntimeError("the step that always fails")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--on-save-failure", default="stop")
    parser.add_argument("--grace", type=float, default=20.0)
    parser.add_argument("--parallelism", default="ddp")
    parser.add_argument("--diary", type=Path, help="folder of step lines; default: output folder")
    parser.add_argument(
        "--near", default="", help="near repository, of which every 9th save goes on"
    )
    parser.add_argument("--die-at", type=int, default=0)
    given = parser.parse_args()
    given.output_dir.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(given.output_dir),
        max_steps=given.steps,
        near_repo=given.near,
        durable_every=9,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        warmup_steps=3,
        lr_scheduler_type="cosine",
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=8,
        save_strategy="steps",
        save_steps=given.save_steps,
        save_total_limit=3,
        dataloader_num_workers=given.workers,
        on_save_failure=given.on_save_failure,
        grace_seconds=given.grace,
        parallelism=given.parallelism,
        fsdp_transformer_layer_cls_to_wrap="Embedding" if given.parallelism == "fsdp" else "",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Bytes()
    held_out = torch.utils.data.Subset(data, range(0, 601, 37))
    Recording(
        Model(),
        arguments,
        train_dataset=data,
        eval_dataset=held_out,
        callbacks=[Diary(given.diary or given.output_dir, given.pause, given.die_at)],
    ).train()


if __name__ == "__main__":
    main()
