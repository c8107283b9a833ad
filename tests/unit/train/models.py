"""A small model whose training depends on random numbers, and data to train it on."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from resilient.errors import ResilientError
from resilient.train.arguments import TrainingArguments
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.trainer import Trainer


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)
        )
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator) * 0.3)

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Noisy(Dataset):
    """Samples with augmentation from all three global streams, and their index."""

    def __init__(self, size, augment=True):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)
        self.augment = augment

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if self.augment:
            draws = torch.rand(6) + random.random() + np.random.rand()  # noqa: NPY002, TID251
            x = x + 0.1 * draws
            x = x.float()
        return {"x": x, "label": int(self.y[index])}


class Dies(ResilientError):
    pass


class DieAfter(TrainerCallback):
    """The process dies after a step: nothing of it survives but the repository."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, /, **_):
        if state.global_step == self.step:
            raise Dies(f"dead at {self.step}")


def make_trainer(folder, *, callbacks=(), size=50, kind=Trainer, eval_size=0, **options):
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "save_steps": 4,
        "disable_tqdm": True,
        **options,
    }
    return kind(
        Net(),
        TrainingArguments(**options),
        train_dataset=Noisy(size),
        eval_dataset=Noisy(eval_size, augment=False) if eval_size else None,
        callbacks=callbacks,
    )
