"""Checkpoints in the shapes of torchtitan and Megatron, written by torch; those of the rest."""

from __future__ import annotations

import argparse
import json
import shutil
import warnings
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability
from resilient.storage.folder import open_folder

STEP = 9
UNIVERSAL = Path(__file__).parents[1] / "golden" / "universal"


def write_slices(state, folder, files=1):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a single process
        writer = dcp.FileSystemWriter(folder, thread_count=files)
        dcp.save(state, storage_writer=writer, no_dist=True)


def write_titan(run, step=STEP, files=1):
    """Leave what torchtitan leaves: names of its own beside those of the weights."""
    weight = torch.arange(15.0).view(5, 3) + STEP - step
    options = {"lr": 0.25, "betas": (0.9, 0.95), "weight_decay": 0.1}
    state = {
        "layers.0.weight": weight,
        "norm.weight": torch.ones(3),
        "optimizer": {
            **{f"state.{name}.step": torch.tensor(float(step)) for name in NAMES},
            **{f"state.{name}.exp_avg": torch.ones(shape) for name, shape in NAMES.items()},
            **{f"state.{name}.exp_avg_sq": torch.ones(shape) for name, shape in NAMES.items()},
            **{
                f"param_groups.{name}.{key}": value
                for name in NAMES
                for key, value in options.items()
            },
        },
        "lr_scheduler": {"last_epoch": step, "_last_lr": [0.25], "base_lrs": [0.25]},
        "dataloader": {"dp_rank_0": b"\x80\x04N.", "dp_rank_1": b"\x80\x04N.", "world_size": 2},
        "train_state": {
            "step": torch.tensor(step, dtype=torch.int32),
            "ntokens_seen": torch.tensor(4096, dtype=torch.int64),
        },
    }
    write_slices(state, folder := Path(run) / f"step-{step}", files)
    return folder


NAMES = {"layers.0.weight": (5, 3), "norm.weight": (3,)}


def write_megatron(run, step=STEP, files=1):
    """Leave what Megatron-Core leaves: layers stacked, and one file that is common to all ranks."""
    folder = Path(run) / f"iter_{step:07d}"
    name, tensor = (
        "decoder.layers.mlp.linear_fc1.weight",
        torch.arange(24.0).view(2, 4, 3) + STEP - step,
    )
    state = {
        name: tensor,
        **{f"optimizer.state.{kind}.{name}": tensor + 1 for kind in ("exp_avg", "fp32_param")},
        **{f"rng_state/shard_{rank}.0_2.1": b"states" for rank in range(2)},
    }
    write_slices(state, folder, files)
    arguments = argparse.Namespace(
        world_size=2, tensor_model_parallel_size=2, consumed_train_samples=72, train_iters=100
    )
    groups = [{"lr": 0.25, "step": step, "params": []}]
    common = {
        "iteration": step,
        "args": arguments,
        "checkpoint_version": 3.0,
        "optimizer": {"optimizer": {"param_groups": groups}},
        "opt_param_scheduler": {"num_steps": 72, "max_lr": 0.5},
    }
    torch.save(common, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    backend |= {"common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backend))
    (Path(run) / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    return folder


def write_universal(run, stage=2):
    """Leave what DeepSpeed's own script left (tests/golden/make_universal.py)."""
    shutil.copytree(UNIVERSAL / f"zero{stage}", run, dirs_exist_ok=True)
    return Path(run) / "global_step3"


def accelerate_run():
    """Return what accelerate trains: itself, and what it prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 4)), 2)
    objects = accelerator.prepare(model, optimizer, schedule, data)
    accelerator.register_for_checkpointing(Counted())
    return accelerator, *objects


def write_accelerate(folder, beside=None):
    """Save with accelerate three steps after the beginning, and after three more; return it."""
    accelerator, model, optimizer, schedule, data = accelerate_run()
    for place in [folder] if beside is None else [folder, beside]:
        for (batch,) in data:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            schedule.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.save_state(str(place))
    return accelerator, model, optimizer, schedule


class Counted:
    """An object of a script."""

    seen = 3

    def state_dict(self):
        return {"seen": self.seen, "held": torch.arange(3)}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def lightning_run(folder, epochs, **options):
    """Return what Lightning trains, and its trainer and data."""
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 2)

        def training_step(self, batch, _):
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **options,
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 4)), 2)
    return Model(), trainer, data


def write_lightning(folder):
    """Train two epochs with Lightning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else is on this machine
        model, trainer, data = lightning_run(folder, 2)
        trainer.fit(model, data)
        trainer.save_checkpoint(path := Path(folder) / "last.ckpt")
    return path


def look(path):
    """Return what a folder or a file holds."""
    folder = open_folder(str(path))
    return read_layout(folder, folder.list())


def verdict(path):
    return assess_resumability(look(path), str(path))


def shapes(contents, part):
    return {tensor.name: tensor.shape for tensor in contents.tensors if tensor.part == part}


def alter(path, change):
    """Load a file with torch, change what is in it and save it again."""
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def train_further(path: Path) -> None:
    """Change what each step of a Trainer's run changes: weights, moments and random state."""
    for file in sorted(path.glob("model*.safetensors")):
        held = safetensors.torch.load_file(file)
        held = {name: value * 1.5 for name, value in held.items()}
        safetensors.torch.save_file(held, file, {"format": "pt"})
    optimizer = torch.load(path / "optimizer.pt", weights_only=False)
    for state in optimizer["state"].values():
        state["exp_avg"].mul_(2)
    torch.save(optimizer, path / "optimizer.pt")
    random = torch.load(path / "rng_state.pth", weights_only=False)
    random["cpu"][64:72] = 1
    torch.save(random, path / "rng_state.pth")
