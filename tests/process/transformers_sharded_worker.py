"""Runs of stock Transformers that shard, and ours that go on with them; two ranks each.

python transformers_sharded_worker.py FOLDER PORT...

Each rank writes ``<kind>-<whose>-<rank>.json``: the samples and the loss of each micro-batch.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from tests.helpers.hf_runs import BASE, Tokens, gpt2, make, recording, stack
from tests.process.deepspeed_forks import exit_codes, fork_world, preload
from tests.process.transformers_sharded_kinds import KINDS, SAVED

RANKS = 2


def make_theirs(folder, kind):
    """Train to the end by stock Transformers, as it would on GPUs."""
    from transformers import Trainer, TrainingArguments

    shard_on_cpu()
    args = TrainingArguments(
        output_dir=str(folder / kind),
        report_to="none",
        label_names=["labels"],
        save_steps=SAVED,
        **BASE,
        **KINDS[kind][0],
    )
    trainer = recording(Trainer)(gpt2(), args, data_collator=stack, train_dataset=Tokens(32, 1))
    trainer.train()
    say(folder, f"{kind}-theirs", trainer.seen)


def shard_on_cpu():
    """Let accelerate shard here: it trains plain replicas on a CPU, without a word."""
    import accelerate.state as states
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FullyShardedDataParallel

    plain, plain_flat = states.AcceleratorState.__init__, FullyShardedDataParallel.__init__

    def forced(self, *given, fsdp_plugin=None, **named):
        plain(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            states.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    def flat(self, *given, **named):
        plain_flat(self, *given, **{**named, "device_id": torch.device("cpu")})

    states.AcceleratorState.__init__ = forced
    FullyShardedDataParallel.__init__ = flat


def go_on(folder, kind):
    """Go on with what they saved in the middle, by ours."""
    _, ours, strategy, _ = KINDS[kind]
    trainer = make("gpt2_sharded", folder / f"{kind}-ours", **ours)
    trainer.train(str(folder / kind / f"checkpoint-{SAVED}"))
    assert trainer.strategy.name == strategy, trainer.strategy.name
    trainer.save_model(str(folder / f"{kind}-exported"))
    say(folder, f"{kind}-ours", trainer.seen)


def say(folder, name, seen):
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(seen))


def rank(work, folder, kind):
    warnings.simplefilter("ignore")
    # accelerate sets another number of threads where this is not set, one per physical core, and
    # the sums of a layer norm's gradients are other ones then.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    work(folder, kind)


def main(folder, *ports):
    preload()
    for name in ("transformers", "accelerate", "transformers.models.gpt2.modeling_gpt2"):
        import_module(name)
    import_module("resilient.strategies.fsdp1")
    gc.collect()
    gc.freeze()
    works = [(work, kind) for kind in KINDS for work in (make_theirs, go_on)]
    for (work, kind), port in zip(works, ports, strict=True):
        ranks = fork_world(RANKS, port, partial(rank, work, folder, kind))
        if ranks is None:
            return
        assert exit_codes(ranks) == {0}, (work, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
