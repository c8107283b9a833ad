"""Every way to save memory at once, killed and started again: ``memory_worker.py FOLDER PORT...``.

``fsdp``: shards, activations computed again, bf16. A rank really runs out of memory, the life ends,
and the next goes on with half the batch and twice the accumulation. ``ddp``: the same with
replicas, where the batch is cut within the life. Each life of each run is a world of its own.
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

from resilient import Trainer, TrainerCallback, TrainingArguments
from tests.process.deepspeed_forks import exit_codes, fork_world
from tests.process.dying import die_together, see_landed
from tests.process.strategies_worker import Rows, Tower
from tests.process.strategy_kinds import Kind

STEPS = 10
OUT_OF_MEMORY = 1
LEAN = {"activation_checkpointing": True, "bf16": True}
KINDS = {
    "fsdp": {"fsdp": True, "fsdp_transformer_layer_cls_to_wrap": "Block", **LEAN},
    "ddp": {"auto_find_batch_size": True, **LEAN},
}
# More than any machine has.
ABSURD_BYTES = 1 << 60
# (folder, kind, batch, accumulation, the step after which memory is short, or all are killed)
LIVES = [
    ("fsdp-unbroken", "fsdp", 4, 1, 4, 0),
    ("fsdp-unbroken", "fsdp", 2, 2, 0, 0),
    ("fsdp-killed", "fsdp", 4, 1, 4, 0),
    ("fsdp-killed", "fsdp", 2, 2, 0, 8),
    ("fsdp-killed", "fsdp", 2, 2, 0, 0),
    ("ddp-unbroken", "ddp", 4, 1, 1, 0),
    ("ddp-killed", "ddp", 4, 1, 1, 6),
    ("ddp-killed", "ddp", 4, 1, 1, 0),
]


class Numbered(Rows):
    """Says which sample each is."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "index": index}


class Tight(Tower):
    """On rank 1 there is no memory for more than two samples once ``is_short`` is set."""

    is_short = False

    def forward(self, x, labels):
        if self.is_short and len(x) > 2 and os.environ["RANK"] == "1":
            torch.empty(ABSURD_BYTES, dtype=torch.uint8)
        return super().forward(x, labels)


class Remembers(Trainer):
    """Knows the samples of each step; those of a step that was not made are forgotten."""

    def training_step(self, model, inputs, *counted):
        index = inputs.pop("index").tolist()
        loss = super().training_step(model, inputs, *counted)
        before = self.seen.get(self.state.global_step, [])
        is_anew = len(before) % len(index) or len(before) >= len(index) * self.passes
        self.seen[self.state.global_step] = index if is_anew else before + index
        return loss

    @property
    def passes(self):
        return self.args.gradient_accumulation_steps


class Fate(TrainerCallback):
    """Lets memory be short, or kills all ranks; both when the last save has landed."""

    def __init__(self, folder, short_after, die_after) -> None:
        self._folder, self._short_after, self._die_after = folder, short_after, die_after

    def on_step_begin(self, args, state, control, /, **context):
        step = state.global_step
        if self._short_after and step >= self._short_after:
            see_landed(self._folder, step // 2 * 2)
            context["model"].is_short = True
        if self._die_after and step == self._die_after:
            see_landed(self._folder, step // 2 * 2)
            die_together(self._folder, step, 2)


def main(folder, ports):
    for name in ("torch.distributed.fsdp", "resilient.strategies.fsdp"):
        import_module(name)
    gc.collect()
    gc.freeze()
    for (run, kind, *life), port in zip(LIVES, ports, strict=True):
        work = partial(train, folder / run, kind, *life)
        ranks = fork_world(2, port, work)
        if ranks is None:
            return
        ends, (_, _, short_after, die_after) = exit_codes(ranks), life
        expected = {-signal.SIGKILL} if die_after else {0}
        if kind == "fsdp" and short_after:
            assert ends - {-signal.SIGKILL} == {OUT_OF_MEMORY}, (run, life, ends)
        else:
            assert ends == expected, (run, life, ends)


def train(folder, kind, batch, accumulation, short_after, die_after):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    model = Tight(Kind())
    trainer = Remembers(
        model,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.01,
            logging_steps=1,
            save_steps=2,
            save_overlap=False,
            disable_tqdm=True,
            use_cpu=True,
            **KINDS[kind],
        ),
        train_dataset=Numbered(96),
        callbacks=[Fate(folder, short_after, die_after)],
    )
    trainer.seen = {}
    try:
        trainer.train()
    except RuntimeError as error:
        if kind != "fsdp" or "can't allocate memory" not in str(error):
            raise
        os._exit(OUT_OF_MEMORY)  # as a job that is out of memory ends: no good-byes
    said = {
        "batch": trainer.state.train_batch_size,
        "seen": trainer.seen,
        "kinds": sorted({type(one).__name__ for one in model.parameters()}),
        "dtypes": sorted(set().union(*(block.dtypes for block in model.blocks))),
        "calls": model.blocks[0].calls,
    }
    (folder / f"seen-{os.environ['RANK']}").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
