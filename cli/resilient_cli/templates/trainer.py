"""Training that survives kills. After any stop, run the same command again.

resilient train train.py --config train.toml
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments

CONTEXT = 8


class Bytes(Dataset[dict[str, torch.Tensor]]):
    """Your data. The items of a sample go to the model's ``forward`` by name."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = index + CONTEXT
        return {"before": self.text[index:end], "labels": self.text[end]}


class Model(nn.Module):
    """Your model, whose ``forward`` returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layers = nn.Sequential(nn.Linear(CONTEXT * 32, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, before: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits (batch, 256)."""
        logits = self.layers(self.embed(before).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    """Train from the step that an earlier start has saved."""
    args = TrainingArguments.from_command_line()
    torch.manual_seed(args.seed)
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    data, held_out = Bytes(text[:-4096]), Bytes(text[-4096:])
    trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=held_out)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
