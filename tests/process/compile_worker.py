"""Compiled trainings of two ranks: unbroken, killed, and gone on with in another way.

python compile_worker.py FOLDER PORT...

Each life of each run is a world of its own. Each rank writes down its losses and how many graphs
were compiled (``seen-<rank>.json``).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from resilient import Trainer, TrainerCallback, TrainingArguments
from tests.process.deepspeed_forks import exit_codes, fork_world
from tests.process.dying import die_together

RANKS, STEPS, SAVE_STEPS, DIE_AFTER = 2, 8, 2, 5
_HEAVY = (
    *("torch.distributed.fsdp", "torch._dynamo", "torch._inductor.compile_fx"),
    "resilient.strategies.fsdp",
)
_SHARDED = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]},
}
KINDS = {
    "plain": {},
    "ddp": {"torch_compile_backend": "aot_eager"},
    "ddp_inductor": {"torch_compile": True},
    "fsdp": {"torch_compile_backend": "aot_eager", **_SHARDED},
}
# (folder, kind, the step after which all ranks are killed)
WORLDS = [
    ("plain", "plain", 0),
    *(
        (f"{kind}-{end}", kind, die_after)
        for kind in KINDS
        if kind != "plain"
        for end, die_after in (("unbroken", 0), ("killed", DIE_AFTER), ("killed", 0))
    ),
    *(("from-fsdp-to-plain", kind, end) for kind, end in (("fsdp", DIE_AFTER), ("plain", 0))),
    *(("from-plain-to-fsdp", kind, end) for kind, end in (("plain", DIE_AFTER), ("fsdp", 0))),
]


class Rows(Dataset):
    """Points and the class that each belongs to."""

    def __init__(self, size) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long() + (self.x[:, 0] > 0.5).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 20)
        self.down = nn.Linear(20, 10)
        self.drop = nn.Dropout(0.2)

    def forward(self, hidden):
        return hidden + self.drop(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(10, 3)

    def forward(self, x, labels):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class DieAfter(TrainerCallback):
    """Dies in the middle of a step, once the save before it is there."""

    def __init__(self, folder, step) -> None:
        self._folder = folder
        self._step = step

    def on_step_begin(self, args, state, control, /, **_):
        if self._step and state.global_step == self._step:
            die_together(self._folder, self._step, SAVE_STEPS)


def main(folder, ports):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for name in _HEAVY:
        import_module(name)
    gc.collect()
    gc.freeze()
    for (run, kind, die_after), port in zip(WORLDS, ports, strict=True):
        ranks = fork_world(RANKS, port, partial(train, folder / run, kind, die_after))
        if ranks is None:
            return
        ends = exit_codes(ranks)
        assert ends == ({-signal.SIGKILL} if die_after else {0}), (run, kind, ends)


def train(folder, kind, die_after):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    torch.manual_seed(int(os.environ["RANK"]))  # all begin as rank 0 all the same
    folder.mkdir(exist_ok=True)
    trainer = Trainer(
        Tower(),
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=SAVE_STEPS,
            disable_tqdm=True,
            use_cpu=True,
            **KINDS[kind],
        ),
        # The last micro-batches of a pass are shorter.
        train_dataset=Rows(54),
        eval_dataset=Rows(13),
        callbacks=[DieAfter(folder, die_after)],
    )
    trainer.train()
    history = trainer.state.log_history
    said = {
        "losses": [one["loss"] for one in history if "loss" in one],
        "evaluations": [one["eval_loss"] for one in history if "eval_loss" in one],
        "names": list(trainer.model.state_dict()),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "calls": torch._dynamo.utils.counters["stats"]["calls_captured"],
    }
    (folder / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]])
