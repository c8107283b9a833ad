"""Classifier of handwritten digits, with metrics and a callback whose curves are saved.

python examples/curves.py runs/curves          # kill it and start it again
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Subset, TensorDataset

from resilient import Trainer, TrainerCallback, TrainingArguments


class Net(nn.Linear):
    """One layer over 64 pixels."""

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits (batch, 10)."""
        logits = super().forward(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Curves(TrainerCallback):
    """Callback that collects losses and accuracies, prints progress, and is saved with the run."""

    def __init__(self) -> None:
        self.state: dict[str, list[float]] = {"loss": [], "eval_accuracy": []}

    def on_step_end(self, args: Any, state: Any, control: Any, /, **_: Any) -> None:
        """Print every hundred steps."""
        if state.global_step % 100 == 0:
            print(f"step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, /, **more: Any) -> None:
        """Keep the logged values."""
        for name in self.state.keys() & more["logs"].keys():
            self.state[name].append(more["logs"][name])

    def on_train_end(self, args: Any, state: Any, control: Any, /, **_: Any) -> None:
        """Print the last value of each curve."""
        print({name: round(values[-1], 3) for name, values in self.state.items() if values})

    def state_dict(self) -> dict[str, Any]:
        """Return the curves."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the curves."""
        self.state = state_dict


def right(prediction: Any) -> dict[str, float]:
    """Return the share of digits that are recognised."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(folder: str, steps: int) -> Trainer:
    """Train, and continue where an earlier start of this script stopped."""
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16).float(), torch.tensor(digits.target))
    train, evaluation = (Subset(data, range(*bounds)) for bounds in ((1400,), (1400, 1797)))
    settings = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 10}
    args = TrainingArguments(
        folder, max_steps=steps, eval_strategy="steps", save_steps=20, **settings
    )
    datasets = {"train_dataset": train, "eval_dataset": evaluation, "compute_metrics": right}
    trainer = Trainer(Net(64, 10), args, callbacks=[Curves()], **datasets)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/curves", int((sys.argv[2:] or [200])[0]))
