"""Training loop on accelerate that survives kills. After any stop, run the same command again.

resilient train train.py          # needs: pip install accelerate
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.integrations.accelerate import AcceleratorCheckpointer

CONTEXT, EPOCHS = 8, 2


def read_data() -> TensorDataset:
    """Return your data: int64 (samples, CONTEXT) and int64 (samples,)."""
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:20000]
    windows = (
        torch.frombuffer(bytearray(source), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 1)
    )
    return TensorDataset(windows[:, :-1], windows[:, -1])


def main() -> None:
    """Train from the step that an earlier start has saved."""
    torch.manual_seed(0)
    # Without a GPU accelerate trains each rank alone unless cpu=True is set.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(read_data(), batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with AcceleratorCheckpointer(accelerator, "runs/first", keep_last=3) as checkpointer:
        step = checkpointer.resume() or 0
        while checkpointer.epoch < EPOCHS:
            for before, after in checkpointer.batches(loader):
                loss = nn.functional.cross_entropy(model(before), after)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 50 == 0:
                    checkpointer.save(step, metrics={"loss": loss.item()})
                    accelerator.print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
