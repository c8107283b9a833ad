"""Write universal checkpoints with DeepSpeed itself: python tests/golden/make_universal.py FOLDER.

An engine trains three steps, saves, and DeepSpeed's own script converts what it saved.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 3
CONVERT = (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal")
ALONE = ("--num_extract_workers", "1", "--num_merge_workers", "1")


def save(stage: int, folder: Path) -> None:
    import deepspeed
    import torch

    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    engine.save_checkpoint(folder)


def convert(source: Path, target: Path, stage: int) -> None:
    tag = f"global_step{STEPS}"
    more = () if stage == 3 else ("--inject_missing_state",)
    command = (*CONVERT, "--input_folder", source / tag, "--output_folder", target / tag)
    subprocess.run((*command, *ALONE, *more), check=True)


def describe(folder: Path) -> dict[str, object]:
    """Return what torch loads of it."""
    import torch

    def load(path):
        return torch.load(path, weights_only=False)

    state = load(next(folder.glob("*/*model_states.pt")))
    pieces = sorted(folder.glob("*/zero/*/*.pt"))
    values = {f"{one.parent.name}/{one.stem}": load(one) for one in pieces}
    held = {name: one["param"] if isinstance(one, dict) else one for name, one in values.items()}
    groups = load(next(folder.glob("*/zero/optimizer_state.pt")))["param_groups"]
    return {
        "step": state["global_steps"],
        "schedule": state["lr_scheduler"]["last_batch_iteration"],
        "version": state["ds_version"],
        "shapes": {name: list(one) for of in state["param_shapes"] for name, one in of.items()},
        "rates": [one["lr"] for one in groups],
        "values": {name: torch.as_tensor(one).flatten().tolist() for name, one in held.items()},
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:  # in a world of its own
        save(int(sys.argv[2]), Path(sys.argv[1]))
        sys.exit()
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    for number in (2, 3):
        kept = Path(sys.argv[1]) / f"zero{number}"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as held:
            subprocess.run((sys.executable, __file__, held, str(number)), check=True)
            convert(Path(held), kept, number)
        told = json.dumps(describe(kept), indent=1)
        kept.with_suffix(".json").write_text(told + "\n")
