"""LoRA fine-tuning: a small GPT learns one module's source, an adapter learns another one's.

python examples/lora.py runs/lora          # kill it and start it again
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from resilient import Trainer, TrainingArguments

LENGTH = 32


class Windows(Dataset):
    """Consecutive windows of the source of a module of the standard library, as bytes."""

    def __init__(self, module: str) -> None:
        text = (Path(sysconfig.get_path("stdlib")) / module).read_bytes()[:12000]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def arguments(folder: str, steps: int) -> TrainingArguments:
    """Return the arguments that both trainings share."""
    return TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        save_steps=20,
    )


def main(folder: str, steps: int) -> Trainer:
    """Train the base, then its adapter, and continue where an earlier start stopped."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    Trainer(base, arguments(f"{folder}/base", 60), train_dataset=Windows("argparse.py")).train()
    torch.manual_seed(1)
    lora_config = LoraConfig(r=8, lora_dropout=0.05, target_modules=["c_attn"], fan_in_fan_out=True)
    model, text = get_peft_model(base, lora_config), Windows("textwrap.py")
    trainer = Trainer(
        model, arguments(f"{folder}/lora", steps), train_dataset=text, eval_dataset=text
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model(f"{folder}/adapter")  # only the adapter: a few kilobytes
    after = trainer.evaluate()["eval_loss"]
    PeftModel.from_pretrained(model.unload(), f"{folder}/adapter")
    print(f"eval_loss {before:.3f} -> {after:.3f}")
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lora", int((sys.argv[2:] or [100])[0]))
