"""Contrastive learning: two views of a digit become neighbours, without labels (InfoNCE).

python examples/contrastive.py runs/contrastive          # kill it and start it again
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments

TEMPERATURE = 0.2


class Pairs(Dataset):
    """Positive pair for each digit: two views of it, shifted and with noise."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"first": self.view(index), "second": self.view(index)}

    def view(self, index: int) -> torch.Tensor:
        """Return an image shifted by at most one pixel; random numbers resume with the run."""
        moves = torch.randint(-1, 2, (2,)).tolist()
        shifted = torch.roll(self.images[index], moves, (0, 1))
        return (shifted + 0.1 * torch.randn(8, 8)).flatten()


class Encoder(nn.Module):
    """Encoder of 64 pixels to points on a sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return vectors of length one, shape (batch, 32)."""
        return nn.functional.normalize(self.layers(pixels), dim=-1)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of finding the partner of each view in the batch, in both directions."""
        alike = self.embed(first) @ self.embed(second).T / TEMPERATURE
        partner = torch.arange(len(first))
        loss = nn.functional.cross_entropy(alike, partner)
        return {"loss": (loss + nn.functional.cross_entropy(alike.T, partner)) / 2}


def main(folder: str, steps: int) -> Trainer:
    """Train, and continue where an earlier start of this script stopped."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16).float()
    torch.manual_seed(0)
    settings = {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "save_steps": 20}
    args = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=128, **settings)
    trainer = Trainer(Encoder(), args, train_dataset=Pairs(images[:1400]))
    trainer.train()
    with torch.no_grad():
        embeddings = trainer.model.eval().embed(images.flatten(1)).numpy()
    near = KNeighborsClassifier(5).fit(embeddings[:1400], digits.target[:1400])
    print(
        f"neighbours tell {near.score(embeddings[1400:], digits.target[1400:]):.3f} of the digits"
    )
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/contrastive", int((sys.argv[2:] or [300])[0]))
