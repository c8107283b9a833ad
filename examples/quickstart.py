"""Model of the byte that follows three others in Python's source; kill it and start it again.

resilient train examples/quickstart.py          # or: python examples/quickstart.py
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments

CONTEXT = 3


class NextByte(Dataset):
    """Every position in a text: the bytes before it, and the byte that follows."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = index + CONTEXT
        return {"before": self.text[index:end], "labels": self.text[end]}


class Mlp(nn.Module):
    """Model that embeds three bytes and predicts the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * 32, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256)
        )

    def forward(self, before: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits (batch, 256)."""
        logits = self.layers(self.embed(before).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    """Train, and continue where an earlier start of this script stopped."""
    source = Path(sysconfig.get_path("stdlib"))
    text = b"".join(
        (source / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py")
    )
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir="runs/quickstart",
        max_steps=1000,
        per_device_train_batch_size=128,
        learning_rate=3e-3,
        logging_steps=100,
        eval_strategy="steps",
        save_steps=100,
        save_total_limit=3,
    )
    trainer = Trainer(
        Mlp(), args, train_dataset=NextByte(text[:-8192]), eval_dataset=NextByte(text[-8192:])
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
