"""Train adapters beside frozen layers; die by SIGKILL after a step if that is asked for."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trainer import Trainer

STEPS = 9


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = nn.Linear(128, 128)
        self.down, self.up = nn.Linear(128, 2, bias=False), nn.Linear(2, 128, bias=False)
        self.base.requires_grad_(requires_grad=False)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.1)

    def forward(self, x, labels):
        out = self.base(x) + self.up(self.down(nn.functional.dropout(x, 0.2, self.training)))
        return {"loss": (out - labels).square().mean()}


class Noise(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = torch.randn(128, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.flip(0)}


class DieAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, die_after: int = 0, **options) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=2,
        save_total_limit=2,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    callbacks = [DieAfter(die_after)] if die_after else []
    trainer = Trainer(model=Adapted(), args=args, train_dataset=Noise(), callbacks=callbacks)
    trainer.train()
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]))
