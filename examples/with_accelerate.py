"""Loop on accelerate that survives a kill.

python examples/with_accelerate.py runs/accelerate          # kill it and start it again
torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py runs/accelerate
"""

from __future__ import annotations

import hashlib
import sys

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilient.integrations.accelerate import AcceleratorCheckpointer


def read_digits() -> TensorDataset:
    """Return scikit-learn's images of digits: float32 (1797, 64), int64 (1797,)."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return TensorDataset(images, torch.tensor(digits.target))


def main(folder: str, epochs: int) -> None:
    """Train, and continue where an earlier start of this script stopped."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layers = [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.9)
    loader = DataLoader(read_digits(), batch_size=32, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    losses: list[float] = []
    with AcceleratorCheckpointer(accelerator, folder, losses=losses, keep_last=3) as checkpointer:
        step = checkpointer.resume() or 0
        while checkpointer.epoch < epochs:
            for images, digits in checkpointer.batches(loader):
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), digits)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                step += 1
                losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
                if step % 10 == 0:
                    checkpointer.save(step, metrics={"loss": losses[-1]})
    bits = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    bits.append(str(losses).encode())
    print(f"{step} steps, weights {hashlib.sha256(b''.join(bits)).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate", int((sys.argv[2:] or [8])[0]))
