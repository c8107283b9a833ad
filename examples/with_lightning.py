"""Lightning's Trainer that survives a kill: one line is ours.

python examples/with_lightning.py runs/lightning          # kill it and start it again
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from resilient.integrations.lightning import ResilientCheckpoint


class Digits(LightningModule):
    """Classifier of scikit-learn's images of digits."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers, nn.Linear(64, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of images (batch, 64)."""
        images, digits = batch
        return nn.functional.cross_entropy(self.layers(images), digits)

    def validation_step(self, batch: Any, _: int) -> None:
        """Measure the loss on images that are not trained on."""
        images, digits = batch
        self.log("loss", nn.functional.cross_entropy(self.layers(images), digits))

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


def main(folder: str, epochs: int) -> None:
    """Train, and continue where an earlier start of this script stopped."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    train, held_out = random_split(
        TensorDataset(images, torch.tensor(digits.target)), [1500, len(images) - 1500]
    )
    module = Digits()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ResilientCheckpoint(folder, every_n_steps=10, keep_last=3)],
    )
    trainer.fit(module, DataLoader(train, 32, shuffle=True), DataLoader(held_out, 297))
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in module.state_dict().values())
    print(f"{trainer.global_step} steps, weights {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning", int((sys.argv[2:] or [8])[0]))
