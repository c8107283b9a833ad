"""Adversarial training: digits and their worst neighbours are learned together (FGSM).

python examples/adversarial.py runs/adversarial          # kill it and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from resilient import Trainer, TrainingArguments

REACH = 0.15


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits (batch, 10)."""
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def worst_near(model: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the pixels moved by ``REACH`` in the direction in which the loss grows."""
    with torch.enable_grad():
        attacked_pixels = pixels.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(attacked_pixels, labels)["loss"], attacked_pixels)
    return (pixels + REACH * slope.sign()).clamp(0, 1)


class Hardened(Trainer):
    """Trainer on each batch and on its worst neighbours; evaluates only on the neighbours."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss under attack; in training, its mean with the loss of the clean batch."""
        pixels, labels = inputs
        inputs_attacked = (worst_near(model, pixels, labels), labels)
        loss, outputs = super().compute_loss(model, inputs_attacked, return_outputs=True)
        if model.training:
            loss = (loss + super().compute_loss(model, inputs)) / 2
        return (loss, outputs) if return_outputs else loss


def right(prediction: Any) -> dict[str, float]:
    """Return the share of digits that are recognised under attack."""
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main(folder: str, steps: int) -> Trainer:
    """Train, and continue where an earlier start of this script stopped."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    torch.manual_seed(0)
    settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "save_steps": 20}
    args = TrainingArguments(folder, max_steps=steps, per_device_train_batch_size=32, **settings)
    train, evaluation = (Subset(data, range(*bounds)) for bounds in ((1400,), (1400, 1797)))
    datasets = {"train_dataset": train, "eval_dataset": evaluation, "compute_metrics": right}
    trainer = Hardened(Net(), args, **datasets)
    trainer.train()
    print(f"under attack {trainer.evaluate()['eval_accuracy']:.3f} of the digits are right")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/adversarial", int((sys.argv[2:] or [400])[0]))
