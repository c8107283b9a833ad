"""A byte-level GPT of a million parameters on the source of Python's standard library.

    resilient train --nproc 2 examples/gpt.py --steps 120 --output-dir runs/gpt

Everything about it is deterministic, and it registers a log of the samples it was trained on, so
two runs can be compared: weights, losses and the order of samples, bit for bit.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from resilient import Trainer, TrainingArguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TEXT_BYTES_MAX = 4 << 20
HELD_OUT_BYTES = 128 << 10


def read_source(limit_bytes: int = TEXT_BYTES_MAX) -> bytes:
    """Return the standard library's source in the order of file names, cut at a limit."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for path in sorted(
        root.rglob("*.py"), key=lambda source_file: source_file.relative_to(root).as_posix()
    ):
        inner = path.relative_to(root).parts
        if "site-packages" in inner or "test" in inner:
            continue
        parts.append(path.read_bytes())
        if sum(map(len, parts)) >= limit_bytes:
            break
    return b"".join(parts)[:limit_bytes]


class Windows(Dataset):
    """Consecutive windows of a text, each with the bytes that follow its bytes."""

    def __init__(self, text: bytes, length: int, *, with_index: bool = False) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length
        self.with_index = with_index

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = self.text[index * self.length : (index + 1) * self.length + 1].long()
        sample: dict[str, Any] = {"input_ids": window[:-1], "labels": window[1:]}
        return {**sample, "index": index} if self.with_index else sample


class Block(nn.Module):
    """Causal self-attention and an MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x_btd.shape
        heads = (
            self.qkv(self.norm_1(x_btd)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        attended = functional.scaled_dot_product_attention(
            *heads, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x_btd = x_btd + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x_btd + self.mlp(self.norm_2(x_btd))


class Gpt(nn.Module):
    """Model that predicts the next byte at every position of a window."""

    def __init__(
        self, length: int, width: int = 128, layers: int = 5, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Map int64 (batch, time) to logits (batch, time, 256), and the mean loss in nats."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        activations = self.dropout(self.bytes(input_ids) + self.places(places))
        logits = self.norm(self.blocks(activations)) @ self.bytes.weight.T
        if labels is None:
            return {"logits": logits}
        return {
            "loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class SampleLog:
    """Index of every sample that this rank was trained on, in order; saved with the run."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def add(self, indices: torch.Tensor) -> None:
        """Add a micro-batch: int64 (batch,)."""
        self.seen.append(indices.clone())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all indices: int64 (samples,)."""
        return {"indices": torch.cat(self.seen) if self.seen else torch.zeros(0, dtype=torch.int64)}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Restore the indices."""
        self.seen = [state_dict["indices"].clone()]


class GptTrainer(Trainer):
    """Trainer that records the samples on which it trains."""

    samples: SampleLog

    def training_step(self, model: nn.Module, inputs: Any) -> torch.Tensor:
        """Log the batch, then train on it."""
        self.samples.add(inputs.pop("index"))
        return super().training_step(model, inputs)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output-dir", default="runs/gpt")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--epochs", type=float, default=0.0, help="instead of --steps")
    parser.add_argument("--batch-size", type=int, default=8, help="windows per rank")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--text-bytes", type=int, default=TEXT_BYTES_MAX)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--save-total-limit", type=int, default=None)
    parser.add_argument("--eval-steps", type=int, default=0, help="0 never evaluates")
    parser.add_argument("--eval-samples", type=int, default=64)
    parser.add_argument("--logging-steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--threads", type=int, default=1, help="of torch, per rank")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args(argv)


def build_trainer(options: argparse.Namespace) -> GptTrainer:
    """Return a trainer with these options, before its first step."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    text = read_source(options.text_bytes)
    held_out = text[-HELD_OUT_BYTES:][: options.eval_samples * options.seq_len + 1]
    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=-1 if options.epochs else options.steps,
        num_train_epochs=options.epochs or 1.0,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        weight_decay=0.1,
        logging_steps=options.logging_steps,
        eval_strategy="steps" if options.eval_steps else "no",
        eval_steps=options.eval_steps or None,
        save_steps=options.save_steps,
        save_total_limit=options.save_total_limit,
        dataloader_num_workers=options.workers,
        seed=options.seed,
        bf16=options.bf16,
    )
    trainer = GptTrainer(
        Gpt(options.seq_len),
        args,
        train_dataset=Windows(text[:-HELD_OUT_BYTES], options.seq_len, with_index=True),
        eval_dataset=Windows(held_out, options.seq_len),
    )
    trainer.samples = SampleLog()
    trainer.register("samples", trainer.samples, scope="rank")
    return trainer


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and continue where an earlier attempt stopped."""
    build_trainer(read_options(argv)).train()


if __name__ == "__main__":
    main()
