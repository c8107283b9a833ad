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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.damage import own
from tests.helpers.foreign_folders import (
    accelerate_run,
    lightning_run,
    write_accelerate,
    write_lightning,
    write_megatron,
    write_slices,
    write_titan,
    write_universal,
)
from tests.helpers.sharded_folders import write_zero

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GOLDEN = Path(__file__).parents[1] / "golden" / "transformers" / "gpt2_all" / "run"
WEIGHTS, OPTIMIZER, SCHEDULE, RANDOM, STATE, INDEX = (
    *("weights", "optimizer", "schedule", "random state", "state", "index"),
)
PARITY, SECOND, RECORD, LEDGER = "parity", "second index", "generation record", "ledger"
CONFIG, ARGUMENTS = "configuration", "arguments"


@dataclass(frozen=True)
class Loaded:
    """State of a tool after it loaded a checkpoint.

    Attributes:
        weights: Weights of the model.
        rest: The other state: moments and schedule, or the weights after one more step.
    """

    weights: object
    rest: object = None


@dataclass(frozen=True)
class Sample:
    """One layout.

    Attributes:
        name: for the table.
        make: writes it into an empty folder; returns the folder or the file.
        load: loads it as its tool does; raises when that tool would stop.
        how: what ``load`` is, for the page.
        files: which file is what, relative to the folder.
        is_ours: whether the checkpoint lies in a repository of ours.
        is_general: whether all damages are done to it; if not, those alone that name it.
    """

    name: str
    make: Callable[[Path], Path]
    load: Callable[[Path], Loaded]
    how: str
    files: Mapping[str, str] = field(default_factory=dict)
    is_ours: bool = False
    is_general: bool = True


def make_trainer(folder):
    """Leave a checkpoint, and a later one of the same run beside it."""
    path = Path(shutil.copytree(GOLDEN / "checkpoint-8", folder / "checkpoint-8"))
    run_trainer(path, folder, 12, save_strategy="steps", save_steps=4)
    return path


def load_trainer(path, steps=9):
    return run_trainer(path, path.parent / "out", steps, save_strategy="no")


def run_trainer(path, out, steps, **options):
    """Resume a checkpoint with Transformers, and train on."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(GOLDEN / "checkpoint-8"))
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
    arguments = TrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
        **options,
    )
    began = Began()
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[began])
    trainer.train(resume_from_checkpoint=str(path))
    return Loaded(began.weights, (trainer.state.global_step, copied(model.state_dict())))


class Began(TrainerCallback):
    """Keeps the weights that training begins with."""

    def on_train_begin(self, *_, model, **__):
        self.weights = copied(model.state_dict())


def copied(state):
    return {name: one.clone() for name, one in state.items()}


def make_accelerate(folder):
    write_accelerate(folder / "checkpoint_0", folder / "checkpoint_1")
    return folder / "checkpoint_0"


def load_accelerate(path):
    accelerator, model, optimizer, schedule, _ = accelerate_run()
    accelerator.load_state(str(path))
    own = [one.state_dict() for one in accelerator._custom_objects]
    rest = [optimizer.state_dict(), schedule.state_dict(), own, torch.get_rng_state()]
    return Loaded(copied(model.state_dict()), rest)


def load_lightning(path):
    model, trainer, data = lightning_run(path.parent, 2)
    trainer.fit(model, data, ckpt_path=str(path))
    states = [one.state_dict() for one in trainer.optimizers]
    return Loaded(copied(model.state_dict()), [states, trainer.global_step])


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
    states = []
    for rank in range(held["dp_world_size"]):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        state = torch.load(tag / name, weights_only=False)["optimizer_state_dict"]
        assert state["base_optimizer_state"]["state"], "no state"
        states.append(state)
    return Loaded(held["module"], [held, states])


def make_universal(folder):
    write_universal(folder)
    return folder


def load_universal(path):
    """Open what an engine opens of a universal checkpoint, as it does."""
    tag = path / (path / "latest_universal").read_text()
    held = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
    rest = [held, torch.load(tag / "zero/optimizer_state.pt", weights_only=False)]
    weights = {}
    for name, shape in ((one, it) for group in held["param_shapes"] for one, it in group.items()):
        for file in sorted((tag / "zero" / name).iterdir()):
            value = torch.load(file, weights_only=False)
            assert file.stem == "step" or value["param"].numel() == shape.numel(), "another size"
            weights[name, file.stem] = value
    return Loaded(weights, rest)


def make_slices(folder):
    for step in (8, 9):
        write_slices(_slices(step), path := folder / f"step-{step}")
    return path


def _slices(step):
    one = {"step": torch.tensor(float(step)), "exp_avg": torch.ones(5, 3) * step}
    one |= {"exp_avg_sq": torch.ones(5, 3)}
    return {
        "model": {"w": torch.arange(15.0).view(5, 3) + 9 - step},
        "optimizer": {"state": {"w": one}, "param_groups": [{"lr": 0.5, "params": ["w"]}]},
        "lr_scheduler": {"last_epoch": step},
        "rng": {"cpu": torch.get_rng_state()},
        "step": step,
    }


def make_titan(folder, files=1):
    write_titan(folder, 8, files)
    return write_titan(folder, files=files)


def make_megatron(folder, files=1):
    write_megatron(folder, 8, files)
    return write_megatron(folder, files=files)


def load_slices(path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, path.parent / "whole.pt")
    return Loaded(torch.load(path.parent / "whole.pt", weights_only=False))


def load_megatron(path):
    config = json.loads((path / "metadata.json").read_text())
    assert config["sharded_backend"] == "torch_dist"
    common = torch.load(path / "common.pt", weights_only=False)
    return Loaded(load_slices(path).weights, common)


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
    return Loaded(value["model"], value)


def make_model(folder):
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "checkpoint-8")
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    return folder / "model"


def load_model(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Loaded(copied(AutoModelForCausalLM.from_pretrained(path).state_dict()))


def make_safetensors(folder):
    shutil.copy(GOLDEN / "checkpoint-8/model.safetensors", folder / "model.safetensors")
    return folder / "model.safetensors"


def load_safetensors(path):
    return Loaded(safetensors.torch.load_file(path))


def resume_ours(path):
    return Loaded(*own.resume(path))


OURS = {
    WEIGHTS: "model.r00000.safetensors", OPTIMIZER: "optimizer.r00000.safetensors",
    SCHEDULE: "state.json", RANDOM: "rng_state_0.safetensors", STATE: "trainer_state.json",
    INDEX: "manifest.json", RECORD: "../generations/g000001.json",
    LEDGER: "../ledger/g000001-000000000004.json",
}  # fmt: skip
SLICES = {WEIGHTS: "__0_0.distcp", INDEX: ".metadata"}
SAMPLES = [
    Sample("Trainer", make_trainer, load_trainer, "its `train(resume_from_checkpoint=)`", {
        WEIGHTS: "model.safetensors", OPTIMIZER: "optimizer.pt", SCHEDULE: "scheduler.pt",
        RANDOM: "rng_state.pth", STATE: "trainer_state.json", CONFIG: "config.json"}),
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
    Sample("torchtitan", make_titan, load_slices, "torch's `dcp_to_torch_save`", SLICES),
    Sample("Megatron", make_megatron, load_megatron, "`torch.load` and `dcp_to_torch_save`",
           {**SLICES, STATE: "common.pt", SCHEDULE: "metadata.json"}),
    Sample("torch", make_script, load_script, "`torch.load(weights_only=True)` and its states",
           {WEIGHTS: "last.pt"}),
    Sample("save_pretrained", make_model, load_model, "`from_pretrained`",
           {WEIGHTS: "model-00001-of-00003.safetensors", INDEX: "model.safetensors.index.json"}),
    Sample("safetensors", make_safetensors, load_safetensors, "`load_file`",
           {WEIGHTS: "model.safetensors"}),
    Sample("ours", own.maker(0), resume_ours, "our `train()`, from the newest intact checkpoint",
           OURS, is_ours=True),
    Sample("ours, parity", own.maker(1), resume_ours,
           "our `train()`, from the newest intact checkpoint",
           {**OURS, PARITY: "parity-0-0.r00000.parity", SECOND: "manifest.copy.json"},
           is_ours=True),
]  # fmt: skip
STEP_NAME = re.compile(r"(checkpoint|step|iter)([-_]0*)\d+")
