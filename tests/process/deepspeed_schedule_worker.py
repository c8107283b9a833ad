"""A run whose schedule DeepSpeed's config names: unbroken, killed, and an engine's own beside it.

python deepspeed_schedule_worker.py FOLDER PORT...
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

from resilient import TrainingArguments
from tests.process.deepspeed_forks import exit_codes, fork_world, preload
from tests.process.deepspeed_worker import SAVE_STEPS, Dying
from tests.process.workload import Bytes, Model, Recording

STEPS = 9
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0.001,
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}
RATE, WARMUP = 0.01, 4
LIVES = [("engine", 0), ("unbroken", 0), ("killed", 8), ("killed", 0)]


def main(folder, ports):
    preload()
    for (name, die_after), port in zip(LIVES, ports, strict=True):
        work = partial(by_engine if name == "engine" else train, folder / name, die_after, port)
        ranks = fork_world(1, port, work)
        if ranks is None:
            return
        ends = exit_codes(ranks)
        assert ends == ({-signal.SIGKILL} if die_after else {0}), (name, ends)


def train(folder, die_after, _):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    trainer = Recording(
        Model(),
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=RATE,
            warmup_steps=WARMUP,
            logging_steps=1,
            save_strategy="steps",
            save_steps=SAVE_STEPS,
            disable_tqdm=True,
            use_cpu=True,
            deepspeed={"zero_optimization": {"stage": 1}, "scheduler": SCHEDULE},
        ),
        train_dataset=Bytes(),
        callbacks=[Dying(folder, die_after)],
    )
    trainer.train()


def by_engine(folder, _, port):
    """Write down the rates that DeepSpeed's engine trains with when the schedule is its own."""
    warnings.simplefilter("ignore")
    import deepspeed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    deepspeed.init_distributed("gloo", rank=0, world_size=1, verbose=False)
    model = torch.nn.Linear(2, 1)
    numbers = {"warmup_max_lr": RATE, "warmup_num_steps": WARMUP, "total_num_steps": STEPS}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 1},
            "scheduler": {**SCHEDULE, "params": {**SCHEDULE["params"], **numbers}},
        },
        dist_init_required=False,
    )
    rates = []
    for _ in range(STEPS):
        engine.backward(engine(torch.ones(1, 2)).sum())
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.step()
    folder.mkdir()
    (folder / "rates").write_text(json.dumps(rates))


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
