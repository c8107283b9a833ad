"""Two ranks of stock Transformers with FSDP or DeepSpeed, as forks of one process.

Reads a request from each line of its input, and answers with a line: an object with ``exit``, the
largest exit code of the ranks.
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
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

import torch  # noqa: E402 - the folders are on the path only now
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from tests.helpers.hf_runs import BASE, Tokens, gpt2, recording, stack  # noqa: E402
from tests.process.deepspeed_forks import exit_codes, fork_world, preload  # noqa: E402
from tests.process.transformers_sharded_kinds import KINDS  # noqa: E402
from tests.process.transformers_sharded_worker import shard_on_cpu  # noqa: E402

RANKS = 2


class Began(TrainerCallback):
    """Keeps the weights that training begins with."""

    def on_train_begin(self, *_, model, **__):
        self.weights = gathered(model)


def gathered(model) -> dict[str, torch.Tensor]:
    """Return the weights, put together over the ranks."""
    import deepspeed

    found = {}
    for name, one in model.named_parameters():
        if hasattr(one, "ds_id"):
            with deepspeed.zero.GatheredParameters([one]):
                found[name] = one.detach().clone()
        else:
            value = one.detach()
            found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def train(asked: dict[str, Any]) -> None:
    """Train, or train on, and leave what it had and has in the file that was asked for."""
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    shard_on_cpu()
    args = TrainingArguments(
        output_dir=asked["out"],
        report_to="none",
        label_names=["labels"],
        **BASE,
        **KINDS[asked["kind"]][0],
        **asked["options"],
    )
    began = Began()
    trainer = recording(Trainer)(
        gpt2(), args, data_collator=stack, train_dataset=Tokens(32, 1), callbacks=[began]
    )
    trainer.train(resume_from_checkpoint=asked["resume"])
    rest = [trainer.state.global_step, trainer.seen, gathered(trainer.model)]
    if trainer.args.process_index == 0:
        torch.save([began.weights, rest], asked["answer"])
    trainer.accelerator.wait_for_everyone()


def main() -> None:
    preload()
    for name in ("accelerate", "transformers.models.gpt2.modeling_gpt2"):
        import_module(name)
    gc.collect()
    gc.freeze()
    # What the ranks print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        ranks = fork_world(RANKS, asked["port"], partial(train, asked))
        if ranks is None:
            os._exit(0)
        code = max(map(abs, exit_codes(ranks)))
        answers.write(json.dumps({"exit": code}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
