"""Script for Hugging Face's Trainer after its move: two lines changed, the same losses.

python examples/from_transformers.py runs/moved          # kill it and start it again
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from resilient import Trainer, TrainingArguments  # 1: was `from transformers import ...`

LENGTH = 32


class Windows(Dataset):
    """Consecutive windows of some of the standard library's source, as bytes."""

    def __init__(self, first: int, last: int) -> None:
        text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[first:last]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main(folder: str, steps: int) -> Trainer:
    """Train; here also continue where an earlier start of this script stopped."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    args = TrainingArguments(
        random_numbers="transformers",  # 2: new, and only for the very same losses
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        args=args,
        train_dataset=Windows(0, 12000),
        eval_dataset=Windows(12000, 16000),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/moved", int((sys.argv[2:] or [60])[0]))
