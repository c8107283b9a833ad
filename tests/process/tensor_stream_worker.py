"""Trainings on a stream whose labels are spread unevenly, with layers cut over ranks and without.

python tensor_stream_worker.py FOLDER PORT...

Each life of each run is a world of its own. Each rank writes down its losses and what it has
seen (``seen-<rank>.json``), and all write the model that they end with (``exported``).
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
from torch.utils.data import IterableDataset

from resilient import Trainer, TrainerCallback, TrainingArguments
from tests.process.deepspeed_forks import exit_codes, fork_world
from tests.process.dying import die_together
from tests.unit.train.token_models import WORDS, Sentences

STEPS, SAVE_STEPS, DIE_AFTER = 6, 2, 5
ROWS, EVAL_ROWS = 20, 11
_HEAVY = ("torch.distributed.fsdp", "torch.distributed.tensor", "resilient.strategies.fsdp")
_CUT = {"tp_size": 2, "tp_plan": {"up": "colwise", "down": "rowwise"}}
_CUT_OVER = {"parallelism": {"strategy": "fsdp", **_CUT}}
_RATE = {"learning_rate": 0.02}
_EACH = {"average_tokens_across_devices": False}
# Ranks, samples per micro-batch, and what else the run is told: a step is always of 8 samples.
KINDS = {
    "alone": (1, 8, {"gradient_accumulation_steps": 1}),
    "tp": (2, 4, {"parallelism_config": _CUT}),
    "tp_ddp": (4, 2, {"parallelism_config": _CUT, "dataloader_num_workers": 1}),
    "tp_fsdp": (4, 2, _CUT_OVER),
    "ddp_each": (2, 2, _EACH),
    "tp_ddp_each": (4, 2, {"parallelism_config": _CUT, **_EACH}),
    "tp_dropout": (2, 4, {"parallelism_config": _CUT, **_RATE}),
    "tp_trial": (2, 4, {"parallelism_config": _CUT}),
}
KILLED = ("tp", "tp_ddp", "tp_fsdp")
WORLDS = [
    *((f"{kind}-unbroken", kind, 0) for kind in KINDS),
    *((f"{kind}-killed", kind, die_after) for kind in KILLED for die_after in (DIE_AFTER, 0)),
]


class Tagger(nn.Module):
    """Tells a class per token; takes what its loss is divided by."""

    def __init__(self, dropout=0.0):
        super().__init__()
        wide = {"dtype": torch.float64}
        self.embed = nn.Embedding(WORDS, 6, **wide)
        self.up = nn.Linear(6, 12, **wide)
        self.down = nn.Linear(12, 6, **wide)
        self.head = nn.Linear(6, WORDS, **wide)
        self.dropout = nn.Dropout(dropout)
        # All begin as rank 0 all the same.
        generator = torch.Generator().manual_seed(2 + int(os.environ["RANK"]))
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=generator, **wide) * 0.5)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        hidden = self.embed(input_ids)
        hidden = self.dropout(hidden + self.down(torch.tanh(self.up(hidden))))
        logits = self.head(hidden)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


class Stream(IterableDataset):
    """Sentences without a length; knows its place if it is asked to."""

    def __init__(self, size):
        self.rows = Sentences(size)

    def __iter__(self):
        return (self.rows[index] for index in range(len(self.rows)))


class Placed(Stream):
    """A stream that can be put where it was."""

    at = 0

    def __iter__(self):
        begin, self.at = self.at, 0
        for index in range(begin, len(self.rows)):
            self.at = index + 1
            yield self.rows[index]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state_dict):
        self.at = state_dict["at"]


class Watch(TrainerCallback):
    """Dies in the middle of a step, once the save before it is there."""

    def __init__(self, folder, die_after) -> None:
        self._folder = folder
        self._die_after = die_after

    def on_step_begin(self, args, state, control, /, **_):
        if self._die_after and state.global_step == self._die_after:
            die_together(self._folder, self._die_after, SAVE_STEPS)


def main(folder, ports):
    for name in _HEAVY:
        import_module(name)
    gc.collect()
    gc.freeze()
    for (run, kind, die_after), port in zip(WORLDS, ports, strict=True):
        ranks = fork_world(KINDS[kind][0], port, partial(train, folder / run, kind, die_after))
        if ranks is None:
            return
        ends = exit_codes(ranks)
        assert ends == ({-signal.SIGKILL} if die_after else {0}), (run, kind, ends)


def train(folder, kind, die_after):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    folder.mkdir(exist_ok=True)
    _, batch, options = KINDS[kind]
    makes = partial(Tagger, 0.3 if kind in ("tp_dropout", "tp_trial") else 0.0)
    trainer = Trainer(
        args=TrainingArguments(
            **{
                "output_dir": str(folder),
                "max_steps": STEPS,
                "per_device_train_batch_size": batch,
                "per_device_eval_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "learning_rate": 0.05,
                "include_num_input_tokens_seen": "all",
                "logging_steps": 1,
                "eval_strategy": "steps",
                "eval_steps": 3,
                "save_strategy": "steps",
                "save_steps": SAVE_STEPS,
                "disable_tqdm": True,
                "use_cpu": True,
                **options,
            }
        ),
        train_dataset=(Placed if kind == "tp_fsdp" else Stream)(ROWS),
        eval_dataset=Stream(EVAL_ROWS),
        callbacks=[Watch(folder, die_after)],
        model_init=makes,
    )
    trainer.train(trial=_RATE if kind == "tp_trial" else None)
    trainer.save_model(str(folder / "exported"))
    history = trainer.state.log_history
    said = {
        "losses": [one["loss"] for one in history if "loss" in one],
        "norms": [one["grad_norm"] for one in history if "grad_norm" in one],
        "evaluations": [one["eval_loss"] for one in history if "eval_loss" in one],
        "tokens": trainer.state.num_input_tokens_seen,
        "kinds": sorted({type(one).__name__ for one in trainer.model.parameters()}),
        "labels": trainer.predict(Stream(EVAL_ROWS)).label_ids.tolist(),
    }
    (folder / f"seen-{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]])
