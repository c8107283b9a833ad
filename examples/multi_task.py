"""Multi-task learning: one trunk, two heads (digit, amount of ink), learned loss weights.

python examples/multi_task.py runs/multi_task          # kill it and start it again
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments


class Digits(Dataset):
    """Digits with two targets."""

    def __init__(self, first: int, last: int) -> None:
        digits = load_digits()
        self.pixels = torch.tensor(digits.data[first:last] / 16).float()
        self.digit = torch.tensor(digits.target[first:last])

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = self.pixels[index]
        return {"pixels": pixels, "digit": self.digit[index], "ink": pixels.mean()}


class TwoHeads(nn.Module):
    """Model that weights the loss of each task by its certainty (Kendall, Gal, Cipolla 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1))
        self.heads = nn.ModuleDict({"digit": nn.Linear(64, 10), "ink": nn.Linear(64, 1)})
        self.doubt = nn.Parameter(torch.zeros(2))

    def forward(
        self, pixels: torch.Tensor, digit: torch.Tensor, ink: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the weighted loss and both predictions."""
        features = self.trunk(pixels)
        scores, guess = self.heads["digit"](features), self.heads["ink"](features).squeeze(-1)
        losses = torch.stack(
            [nn.functional.cross_entropy(scores, digit), nn.functional.mse_loss(guess, ink)]
        )
        loss = (losses * torch.exp(-self.doubt) + self.doubt).sum()
        return {"loss": loss, "digit": scores, "ink": guess}


def main(folder: str, steps: int) -> Trainer:
    """Train, and continue where an earlier start of this script stopped."""
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=20,
        label_names=["digit", "ink"],
    )
    evaluation = Digits(1400, 1797)
    trainer = Trainer(TwoHeads(), args, train_dataset=Digits(0, 1400), eval_dataset=evaluation)
    trainer.train()
    digits, ink = trainer.predict(evaluation).predictions
    right = (digits.argmax(-1) == evaluation.digit.numpy()).mean()
    off = abs(ink - evaluation.pixels.mean(1).numpy()).mean()
    print(f"{right:.3f} of the digits are right, ink is off by {off:.4f}")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/multi_task", int((sys.argv[2:] or [300])[0]))
