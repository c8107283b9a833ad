"""Hugging Face's Trainer that survives a kill: one line is ours.

python examples/hf_trainer.py runs/hf          # kill it and start it again
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from resilient.integrations.transformers import ResilientCallback

LENGTH = 32


class Windows(Dataset):
    """Consecutive windows of some of the standard library's source, as bytes."""

    def __init__(self) -> None:
        text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:12000]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main(folder: str, steps: int) -> None:
    """Train, and continue where an earlier start of this script stopped."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    args = TrainingArguments(
        output_dir=f"{folder}/output",
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=7,
        save_steps=10,
        save_total_limit=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Windows())
    trainer.add_callback(ResilientCallback(trainer, f"{folder}/checkpoints"))
    trainer.train()
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history[:-1]]
    bits = b"".join(
        tensor.detach().numpy().tobytes() for tensor in trainer.model.state_dict().values()
    )
    print(f"losses {losses}, weights {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/hf", int((sys.argv[2:] or [150])[0]))
