"""Transformers' Trainer that survives kills. After any stop, run the same command again.

resilient train train.py          # needs: pip install 'resilient-train[hf]'
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from resilient.integrations.transformers import ResilientCallback

LENGTH = 32


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Your data: consecutive windows of a text, as bytes."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    """Train from the step that an earlier start has saved."""
    torch.manual_seed(0)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    args = TrainingArguments(
        output_dir="runs/first/output",
        max_steps=200,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=50,
        save_steps=50,
        report_to="none",
    )
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Windows(text))
    trainer.add_callback(ResilientCallback(trainer, "runs/first/checkpoints"))
    trainer.train()


if __name__ == "__main__":
    main()
