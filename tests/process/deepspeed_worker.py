"""Runs of the workload under DeepSpeed: unbroken, killed and started again, by other numbers.

python deepspeed_worker.py FOLDER PORT...

Each life of each run is a world of its own, which meets at the next port.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

from resilient import TrainerCallback, TrainingArguments
from resilient.train.arguments.deprecated import zero_of
from tests.process.deepspeed_forks import exit_codes, fork_world, preload
from tests.process.dying import die_together
from tests.process.workload import Bytes, Model, Recording

STEPS = 10
SAVE_STEPS = 2
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
OFFLOAD_ALL = {**OFFLOAD, "offload_param": {"device": "cpu", "pin_memory": True}}
KINDS = {
    "zero0": {"deepspeed": {"zero_optimization": {"stage": 0}}, "bf16": True},
    "zero1": {"deepspeed": {"zero_optimization": {"stage": 1, **OFFLOAD}}},
    "zero2": {"deepspeed": {"zero_optimization": zero_of(2), "gradient_clipping": "auto"}},
    "zero3": {
        "deepspeed": {
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 3000,
                "stage3_param_persistence_threshold": 200,
            }
        }
    },
    "zero3off": {"deepspeed": {"zero_optimization": {"stage": 3, **OFFLOAD_ALL}}, "bf16": True},
    "ddp": {"parallelism": "ddp"},
}
ZERO = [kind for kind in KINDS if kind.startswith("zero")]
# Folder -> lives: (kind, ranks, the step after which all are killed).
RUNS = {
    **{f"{kind}-unbroken": [(kind, 2, 0)] for kind in KINDS},
    **{f"{kind}-killed": [(kind, 2, 6), (kind, 2, 0)] for kind in ZERO},
    "elastic": [("zero2", 2, 5), ("zero3", 3, 7), ("ddp", 2, 9), ("zero1", 1, 0)],
}
WORLDS = [(folder, *life) for folder, lives in RUNS.items() for life in lives]


class Dying(TrainerCallback):
    """Writes down what was trained and held, and dies in the middle of a step.

    Each life leaves a checkpoint: the save before the last step has landed when it dies; one that
    is begun at the last step has not.
    """

    def __init__(self, folder, die_after) -> None:
        self._folder = folder
        self._die_after = die_after

    def on_step_begin(self, args, state, control, /, **_):
        if self._die_after and state.global_step == self._die_after:
            die_together(self._folder, self._die_after, SAVE_STEPS)

    def on_train_end(self, args, state, control, /, **context):
        held = sum(flat.numel() for flat in context["optimizer"].state)
        total = sum(getattr(one, "ds_numel", one.numel()) for one in context["model"].parameters())
        norms = [one["grad_norm"] for one in state.log_history if "grad_norm" in one]
        said = {"held": held, "total": total, "norms": norms}
        (self._folder / f"held-{os.environ['RANK']}").write_text(json.dumps(said))


def main(folder, ports):
    preload()
    for (name, kind, size, die_after), port in zip(WORLDS, ports, strict=True):
        ranks = fork_world(size, port, partial(train, folder / name, kind, die_after))
        if ranks is None:
            return
        ends = exit_codes(ranks)
        assert ends == ({-signal.SIGKILL} if die_after else {0}), (name, kind, ends)


def train(folder, kind, die_after):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))  # all begin as rank 0 all the same
    folder.mkdir(exist_ok=True)
    trainer = Recording(
        Model(),
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            max_grad_norm=1.0,
            warmup_steps=3,
            lr_scheduler_type="cosine",
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=5,
            save_strategy="steps",
            save_steps=SAVE_STEPS,
            disable_tqdm=True,
            use_cpu=True,
            **KINDS[kind],
        ),
        train_dataset=Bytes(),
        eval_dataset=torch.utils.data.Subset(Bytes(), range(0, 601, 37)),
        callbacks=[Dying(folder, die_after)],
    )
    trainer.train()
    trainer.save_model(str(folder / "exported"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
