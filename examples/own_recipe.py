"""Custom optimizer, schedule and training step, on handwritten digits.

python examples/own_recipe.py runs/own          # kill it and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from resilient import Trainer, TrainingArguments


class Net(nn.Linear):
    """One layer over 64 pixels."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits (batch, 10)."""
        logits = super().forward(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Noisy(Trainer):
    """Trainer that adds noise to the digits."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Add noise, then make the usual step."""
        pixels, labels = inputs
        return super().training_step(model, (pixels + 0.1 * torch.randn_like(pixels), labels))


def main(folder: str, steps: int) -> Trainer:
    """Train, and continue where an earlier start of this script stopped."""
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    train, evaluation = (Subset(data, range(*bounds)) for bounds in ((1400,), (1400, 1797)))
    model = Net(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.02, 0.2, step_size_up=25)
    args = TrainingArguments(folder, max_steps=steps, save_steps=20)
    options = {
        "train_dataset": train,
        "eval_dataset": evaluation,
        "optimizers": (optimizer, schedule),
    }
    trainer = Noisy(model, args, **options)
    trainer.train()
    print(f"eval_loss {trainer.evaluate()['eval_loss']:.3f}")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/own", int((sys.argv[2:] or [200])[0]))
