"""Runs of stock Hugging Face Trainer that were recorded, and the models and data that they had.

`../shared/fixtures/hf` has them all; `tests/golden/transformers` those that come with the source.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from resilient.train.arguments import TrainingArguments
from resilient.train.trainer import Trainer

HERE = Path(__file__).parents[1] / "golden" / "transformers"
SHARED = Path(__file__).parents[3] / "shared" / "fixtures" / "hf"
VOCABULARY, LENGTH = 97, 16


def gpt2(dropout=0.1):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1234)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_head=2, **drops, **tokens, use_cache=False))


class Tokens(Dataset):
    """Sequences x[t+1] = (5 x[t] + 7 + noise) % VOCABULARY."""

    def __init__(self, size, seed):
        draw = np.random.RandomState(seed)
        rows = np.zeros((size, LENGTH), dtype=np.int64)
        rows[:, 0] = draw.randint(1, VOCABULARY, size)
        for t in range(1, LENGTH):
            noise = (draw.rand(size) < 0.1) * draw.randint(1, VOCABULARY, size)
            rows[:, t] = (5 * rows[:, t - 1] + 7 + noise) % VOCABULARY
        self.rows = torch.from_numpy(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "labels": row, "idx": int(index)}


class Texts(Dataset):
    """Of 4 to 16 tokens."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 17, (size,), generator=draw).tolist()
        self.rows = [torch.randint(1, 97, (length,), generator=draw) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index], "idx": index}


def pad(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)

    def filled(row, value):
        return torch.nn.functional.pad(row, (0, longest - len(row)), value=value)

    return {
        "input_ids": torch.stack([filled(sample["input_ids"], 0) for sample in samples]),
        "labels": torch.stack([filled(sample["labels"], -100) for sample in samples]),
        "idx": torch.tensor([sample["idx"] for sample in samples]),
    }


class Numbers(Dataset):
    """y = w.x + 0.5 + N(0, 0.05) of four features."""

    def __init__(self, size, seed):
        draw = np.random.RandomState(seed)
        self.x = draw.randn(size, 4).astype(np.float32)
        weights = np.array([1.5, -2.0, 0.25, 0.75], dtype=np.float32)
        self.y = (self.x @ weights + 0.5 + 0.05 * draw.randn(size)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x, label = torch.from_numpy(self.x[index]), torch.tensor(self.y[index])
        return {"x": x, "labels": label, "idx": int(index)}


class Line(nn.Module):
    """A line through noisy points; plain, with a buffer that counts."""

    def __init__(self, noise=0.01):
        super().__init__()
        torch.manual_seed(99)
        self.lin = nn.Linear(4, 1)
        self.noise = noise
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x, labels=None):
        if self.training:
            x = x + self.noise * torch.randn_like(x)
            self.seen += x.shape[0]
        logits = self.lin(x).squeeze(-1)
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": nn.functional.mse_loss(logits, labels)}


def stack(samples):
    return {
        name: torch.stack([torch.as_tensor(sample[name]) for sample in samples])
        for name in samples[0]
    }


def recording(trainer):
    """Return a subclass of a Trainer, ours or theirs, that notes what it trains on.

    ``seen`` has the samples and the exact loss of each micro-batch.
    """

    class Recorder(trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.seen = []

        def training_step(self, model, inputs, num_items_in_batch=None):
            indices = inputs.pop("idx").tolist()
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.seen.append((indices, float(loss).hex()))
            return loss

        def prediction_step(self, model, inputs, *more, **kwargs):
            inputs.pop("idx", None)
            return super().prediction_step(model, inputs, *more, **kwargs)

    return Recorder


Recorder = recording(Trainer)


BASE = {
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 42,
    "logging_steps": 1,
    "remove_unused_columns": False,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 3e-3,
    "warmup_steps": 4,
    "weight_decay": 0.01,
    "optim": "adamw_torch",
    "num_train_epochs": 2,
}
EVAL = {"eval_strategy": "steps", "eval_steps": 8, "metric_for_best_model": "loss"}
# Case -> training samples, held-out samples, arguments.
CASES = {
    "gpt2_single": (
        (64, 16),
        {**EVAL, "save_steps": 8, "lr_scheduler_type": "cosine", "load_best_model_at_end": True},
    ),
    "gpt2_all": (
        (64, 16),
        {**EVAL, "save_steps": 8, "lr_scheduler_type": "cosine", "greater_is_better": False},
    ),
    "gpt2_ga_uneven": (
        (58, 0),
        {"gradient_accumulation_steps": 4, "save_steps": 3, "max_grad_norm": 0.5},
    ),
    "gpt2_ddp2_all": ((64, 0), {"save_steps": 4}),
    "gpt2_sharded": ((32, 0), {"save_steps": 4}),
    "reg_sgd": (
        (80, 0),
        {
            "save_steps": 7,
            "optim": "sgd",
            "learning_rate": 0.05,
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"lr_end": 1e-4, "power": 2.0},
        },
    ),
    "reg_earlystop": (
        (80, 24),
        {
            "num_train_epochs": 15,
            "lr_scheduler_type": "constant",
            "save_steps": 10,
            "eval_strategy": "steps",
            "eval_steps": 10,
            "load_best_model_at_end": True,
            "metric_for_best_model": "within",
            "greater_is_better": True,
            "learning_rate": 0.05,
            "warmup_steps": 0,
        },
    ),
}


def make(case, folder, *, kind=Recorder, arguments=TrainingArguments, callbacks=(), **options):
    """Return a trainer, of ours if nothing else is said, with what a recorded run had."""
    (size, evaluation_size), model_options = CASES[case]
    is_gpt2 = case.startswith("gpt2")
    data = Tokens if is_gpt2 else Numbers
    seeds = (1, 2) if is_gpt2 else (3, 4)
    return kind(
        gpt2() if is_gpt2 else Line(),
        arguments(**{**BASE, **model_options, "output_dir": str(folder), **options}),
        train_dataset=data(size, seeds[0]),
        eval_dataset=data(evaluation_size, seeds[1]) if evaluation_size else None,
        data_collator=stack,
        compute_metrics=_within if case == "reg_earlystop" else None,
        callbacks=list(callbacks),
    )


def _within(prediction):
    near = np.abs(prediction.predictions - prediction.label_ids) < 0.25
    return {"within": float(near.mean())}


def read_record(case, rank=None):
    """Return what a run did, as it was recorded."""
    name = "expected.json" if rank is None else f"expected.rank{rank}.json"
    record = json.loads((folder_of(case) / name).read_text())
    record["seen"] = [
        (batch["idx"], batch["loss_hex"]) for step in record["steps"] for batch in step["micro"]
    ]
    return record


def stock_file(folder, case, step, rank=0):
    """Return where it is said what stock Transformers makes of a run on this machine."""
    return Path(folder) / f"stock-{case}-{step}-{rank}.txt"


def folder_of(case):
    return next((root / case for root in (SHARED, HERE) if (root / case).is_dir()), SHARED / case)


def checkpoint_of(case, step):
    return folder_of(case) / "run" / f"checkpoint-{step}"
