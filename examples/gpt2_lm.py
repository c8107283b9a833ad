"""GPT-2 as a language model of source code; an environment variable selects the sharding.

USE_FSDP=1 resilient train --nproc-per-node 2 examples/gpt2_lm.py runs/gpt2        # shards
USE_DEEPSPEED=1 resilient train --nproc-per-node 2 examples/gpt2_lm.py runs/gpt2   # ZeRO

The text is the standard library's source, as bytes: no network is needed. Kill it and start it
again, also with another switch or number of processes: it continues where the last start stopped.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset
from transformers import GPT2Config, GPT2LMHeadModel

from resilient import Trainer, TrainingArguments

LENGTH = 64


class Source(Dataset):
    """Consecutive windows of the first modules of the standard library."""

    def __init__(self, modules: int = 40) -> None:
        files = islice(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")), modules)
        text = bytearray(b"".join(file.read_bytes() for file in files))
        self.text = torch.frombuffer(text, dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def build(folder: str, steps: int) -> Trainer:
    """Return a trainer before its first step."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 48, "n_layer": 2, "n_head": 2}
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=5,
        save_steps=5,
        # USE_FSDP=1: each block is gathered separately. USE_DEEPSPEED=1: ZeRO 2.
        fsdp_transformer_layer_cls_to_wrap="GPT2Block",
    )
    text = Source()
    return Trainer(
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args,
        train_dataset=Subset(text, range(len(text) - 64)),
        eval_dataset=Subset(text, range(len(text) - 64, len(text))),
    )


def main(folder: str, steps: int) -> Trainer:
    """Train, and continue where an earlier start stopped."""
    trainer = build(folder, steps)
    trainer.train()
    trainer.save_model(f"{folder}/model")  # from_pretrained reads it, for any sharding
    print(f"perplexity {math.exp(trainer.evaluate()['eval_loss']):.2f}")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/gpt2", int((sys.argv[2:] or [200])[0]))
