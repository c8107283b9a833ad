"""PyTorch loop of your own that survives a kill: three lines are ours.

python examples/plain_loop.py runs/plain          # kill it and start it again
torchrun --standalone --nproc-per-node 2 examples/plain_loop.py runs/plain
resilient train --nproc-per-node 2 examples/plain_loop.py runs/plain
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resilient import Checkpointer

CONTEXT = 3


def read_text() -> torch.Tensor:
    """Return some of the standard library's source: int64 (bytes,)."""
    source = Path(sysconfig.get_path("stdlib"))
    text = b"".join((source / name).read_bytes() for name in ("argparse.py", "ast.py"))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def draw(text: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes (size, CONTEXT) from random places, and the bytes (size,) that follow."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1))
    return text[starts + torch.arange(CONTEXT)], text[starts + CONTEXT].squeeze(1)


def build() -> nn.Module:
    """Return a model that predicts a byte from three; replicated if there are several ranks."""
    layers = [nn.Embedding(256, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 256)]
    layers += [nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256)]
    model = nn.Sequential(*layers)
    return DistributedDataParallel(model) if dist.is_initialized() else model


def main(folder: str, steps: int) -> None:
    """Train, and continue where an earlier start of this script stopped."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, text = build(), read_text()
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # each rank draws its own samples
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    progress = {"samples": 0}
    with Checkpointer(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, seen=progress, keep_last=3
    ) as checkpointer:
        for step in range((checkpointer.resume() or 0) + 1, steps + 1):
            before, after = draw(text, 64)
            loss = nn.functional.cross_entropy(model(before), after)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress["samples"] += len(after)
            if step % 20 == 0 or step == steps:
                checkpointer.save(step, metrics={"loss": loss})
    bits = b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())
    print(f"{progress['samples']} samples, weights {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/plain", int((sys.argv[2:] or [400])[0]))
