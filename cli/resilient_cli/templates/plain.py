"""Your own training loop that survives kills. After any stop, run the same command again.

resilient train train.py
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn

from resilient import Checkpointer

CONTEXT, STEPS = 8, 400


def main() -> None:
    """Train from the step that an earlier start has saved."""
    torch.manual_seed(0)
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(CONTEXT * 32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Pass each object with state under a name of your choice. Random states are saved too.
    with Checkpointer("runs/first", model=model, optimizer=optimizer, keep_last=3) as checkpointer:
        for step in range((checkpointer.resume() or 0) + 1, STEPS + 1):
            starts = torch.randint(len(text) - CONTEXT, (64, 1))
            before, after = text[starts + torch.arange(CONTEXT)], text[starts + CONTEXT].flatten()
            loss = nn.functional.cross_entropy(model(before), after)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                checkpointer.save(step, metrics={"loss": loss})
                print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
