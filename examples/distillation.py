"""Knowledge distillation: a small net learns handwritten digits from a large one's answers.

python examples/distillation.py runs/distillation          # kill it and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.utils.data import TensorDataset

from resilient import Trainer, TrainingArguments

TEMPERATURE, SHARE = 3.0, 0.7


class Net(nn.Module):
    """One hidden layer over 64 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits (batch, 10)."""
        logits = self.layers(pixels)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Distiller(Trainer):
    """Trainer that adds a frozen teacher's probabilities of all ten digits to the labels."""

    teacher: nn.Module

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the weighted mean of both losses; in evaluation only the loss of the labels."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if model.training:
            with torch.no_grad():
                target = softmax(self.teacher(*inputs)["logits"] / TEMPERATURE, -1)
            output = log_softmax(outputs["logits"] / TEMPERATURE, -1)
            soft = kl_div(output, target, reduction="batchmean") * TEMPERATURE**2
            loss = SHARE * soft + (1 - SHARE) * loss
        return (loss, outputs) if return_outputs else loss


def main(folder: str, steps: int) -> Trainer:
    """Train the teacher, then its student, and continue where an earlier start stopped."""
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    train = torch.utils.data.Subset(data, range(1400))
    evaluation = torch.utils.data.Subset(data, range(1400, 1797))
    settings = {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 32,
    }
    torch.manual_seed(0)
    args = TrainingArguments(f"{folder}/teacher", max_steps=200, save_steps=100, **settings)
    teacher = Trainer(Net(256), args, train_dataset=train)
    teacher.train()
    torch.manual_seed(1)
    args = TrainingArguments(f"{folder}/student", max_steps=steps, save_steps=20, **settings)
    student = Distiller(Net(12), args, train_dataset=train, eval_dataset=evaluation)
    student.teacher = teacher.model.eval().requires_grad_(requires_grad=False)
    student.train()
    print(f"eval_loss {student.evaluate()['eval_loss']:.3f}")
    return student


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/distillation", int((sys.argv[2:] or [300])[0]))
