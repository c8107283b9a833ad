"""One whole checkpoint of each layout, and how the tool it belongs to loads it."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
from foreign_folders import (
    accelerate_run,
    lightning_run,
    write_accelerate,
    write_lightning,
    write_megatron,
    write_slices,
    write_titan,
    write_universal,
)
from sharded_folders import write_zero
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers" / "gpt2_all" / "run"
WEIGHTS, OPTIMIZER, SCHEDULE, RANDOM, STATE, INDEX = (
    *("weights", "optimizer", "schedule", "random state", "state", "index"),
)


@dataclass(frozen=True)
class Sample:
    """One layout.

    Attributes:
        name: for the table.
        make: writes it into an empty folder; returns the folder or the file.
        load: loads it as its tool does; raises when that tool would stop.
        how: what ``load`` is, for the page.
        files: which file is what, relative to the folder.
    """

    name: str
    make: Callable[[Path], Path]
    load: Callable[[Path], object]
    how: str
    files: Mapping[str, str] = field(default_factory=dict)


def make_trainer(folder):
    return Path(shutil.copytree(GOLDEN / "checkpoint-8", folder / "checkpoint-8"))


def load_trainer(path):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(GOLDEN / "checkpoint-8"))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    arguments = TrainingArguments(
        str(path.parent / "out"),
        max_steps=9,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        optim="adamw_torch",
    )
    Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=str(path))


def make_accelerate(folder):
    write_accelerate(folder / "checkpoint_0")
    return folder / "checkpoint_0"


def load_accelerate(path):
    accelerator, *_ = accelerate_run()
    accelerator.load_state(str(path))


def load_lightning(path):
    model, trainer, data = lightning_run(path.parent, 2)
    trainer.fit(model, data, ckpt_path=str(path))


def make_engine(folder):
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).touch()
    write_zero(folder, 2, 2)
    return folder


def load_engine(path):
    """Open what an engine of two ranks opens, as it does."""
    tag = path / (path / "latest").read_text()
    held = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
    assert held["module"].keys()
    for rank in range(held["dp_world_size"]):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(tag / name, weights_only=False)["optimizer_state_dict"]
        assert state["base_optimizer_state"]["state"], "no state"


def make_universal(folder):
    write_universal(folder)
    return folder


def load_universal(path):
    """Open what an engine opens of a universal checkpoint, as it does."""
    tag = path / (path / "latest_universal").read_text()
    held = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
    torch.load(tag / "zero/optimizer_state.pt", weights_only=False)
    for name, shape in ((one, it) for group in held["param_shapes"] for one, it in group.items()):
        for file in sorted((tag / "zero" / name).iterdir()):
            value = torch.load(file, weights_only=False)
            assert file.stem == "step" or value["param"].numel() == shape.numel(), "another size"


def make_slices(folder):
    path = folder / "step-9"
    one = {"step": torch.tensor(9.0), "exp_avg": torch.ones(5, 3), "exp_avg_sq": torch.ones(5, 3)}
    state = {
        "model": {"w": torch.arange(15.0).view(5, 3)},
        "optimizer": {"state": {"w": one}, "param_groups": [{"lr": 0.5, "params": ["w"]}]},
        "lr_scheduler": {"last_epoch": 9},
        "rng": {"cpu": torch.get_rng_state()},
        "step": 9,
    }
    write_slices(state, path)
    return path


def load_slices(path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, path.parent / "whole.pt")


def load_megatron(path):
    config = json.loads((path / "metadata.json").read_text())
    assert config["sharded_backend"] == "torch_dist"
    torch.load(path / "common.pt", weights_only=False)
    load_slices(path)


def make_script(folder):
    model, state = _script()
    optimizer, schedule = state
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedule.state_dict(),
        "rng": torch.get_rng_state(),
        "step": 1,
    }
    torch.save(value, folder / "last.pt")
    return folder / "last.pt"


def _script():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    return model, (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


def load_script(path):
    model, (optimizer, schedule) = _script()
    value = torch.load(path, weights_only=True)
    model.load_state_dict(value["model"])
    optimizer.load_state_dict(value["optimizer"])
    schedule.load_state_dict(value["lr_scheduler"])


def make_model(folder):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "checkpoint-8")
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    return folder / "model"


def load_model(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_pretrained(path)


def make_safetensors(folder):
    shutil.copy(GOLDEN / "checkpoint-8/model.safetensors", folder / "model.safetensors")
    return folder / "model.safetensors"


SLICES = {WEIGHTS: "__0_0.distcp", INDEX: ".metadata"}
SAMPLES = [
    Sample("Trainer", make_trainer, load_trainer, "its `train(resume_from_checkpoint=)`", {
        WEIGHTS: "model.safetensors", OPTIMIZER: "optimizer.pt", SCHEDULE: "scheduler.pt",
        RANDOM: "rng_state.pth", STATE: "trainer_state.json"}),
    Sample("accelerate", make_accelerate, load_accelerate, "its `load_state`", {
        WEIGHTS: "model.safetensors", OPTIMIZER: "optimizer.bin", SCHEDULE: "scheduler.bin",
        RANDOM: "random_states_0.pkl", STATE: "custom_checkpoint_0.pkl"}),
    Sample("Lightning", write_lightning, load_lightning, "its `fit(ckpt_path=)`",
           {WEIGHTS: "last.ckpt"}),
    Sample("DCP", make_slices, load_slices, "torch's `dcp_to_torch_save`", SLICES),
    Sample("DeepSpeed", make_engine, load_engine, "`torch.load` of each file an engine opens", {
        WEIGHTS: "global_step7/mp_rank_00_model_states.pt", INDEX: "latest",
        OPTIMIZER: "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt"}),
    Sample("Universal", make_universal, load_universal,
           "`torch.load` of each file an engine opens", {
        WEIGHTS: "global_step3/zero/0.weight/fp32.pt", INDEX: "latest_universal",
        OPTIMIZER: "global_step3/zero/0.weight/exp_avg.pt",
        STATE: "global_step3/zero/optimizer_state.pt"}),
    Sample("torchtitan", write_titan, load_slices, "torch's `dcp_to_torch_save`", SLICES),
    Sample("Megatron", write_megatron, load_megatron, "`torch.load` and `dcp_to_torch_save`",
           {**SLICES, STATE: "common.pt", SCHEDULE: "metadata.json"}),
    Sample("torch", make_script, load_script, "`torch.load(weights_only=True)` and its states",
           {WEIGHTS: "last.pt"}),
    Sample("save_pretrained", make_model, load_model, "`from_pretrained`",
           {WEIGHTS: "model-00001-of-00003.safetensors", INDEX: "model.safetensors.index.json"}),
    Sample("safetensors", make_safetensors, safetensors.torch.load_file, "`load_file`",
           {WEIGHTS: "model.safetensors"}),
]  # fmt: skip
STEP_NAME = re.compile(r"(checkpoint|step|iter)([-_]0*)\d+")
