"""Go on with recorded runs of Transformers and say what differs, one line of JSON per run.

transformers_worker.py FOLDER CASE:STEP...     # STEP 0: the launcher says it; new: from the start

Losses are held against what stock Transformers made of the run on this machine, if FOLDER says
that, and else against the record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from resilient.train.callbacks.base import EarlyStoppingCallback
from tests.helpers.hf_runs import checkpoint_of, make, read_record, stock_file


def evaluations(history):
    return [one["eval_loss"] for one in history if "eval_loss" in one]


def theirs_of(folder, case, step, rank, count, expected):
    """Return samples and losses of as many micro-batches of theirs."""
    here = stock_file(folder, case, step, rank)
    if here.exists():
        return json.loads(here.read_text())[:count]
    return expected["seen"][len(expected["seen"]) - count :]


def main(folder, *runs):
    torch.set_num_threads(1)
    for run in runs:
        case, _, step = run.partition(":")
        callbacks = [EarlyStoppingCallback(3, 0.001)] if case == "reg_earlystop" else []
        more = {"random_numbers": "transformers"} if step == "new" else {}
        trainer = make(case, Path(folder) / f"{case}-{step}", callbacks=callbacks, **more)
        world = trainer.session.world
        wanted = {"new": False, "0": None}
        ended = trainer.train(wanted.get(step, str(checkpoint_of(case, step))))
        expected = read_record(case, world.rank if world.size > 1 else None)
        made = theirs_of(folder, case, step, world.rank, len(trainer.seen), expected)
        pairs = list(zip(trainer.seen, map(tuple, made), strict=True))
        told = [one["learning_rate"] for one in trainer.state.log_history if "loss" in one]
        rates = [one["learning_rate"] for one in expected["log_history"] if "loss" in one]
        said = {
            "run": run,
            "micro_batches": len(trainer.seen),
            "differ": [nth for nth, (one, other) in enumerate(pairs) if one != other],
            "misplaced": [nth for nth, (one, other) in enumerate(pairs) if one[0] != other[0]],
            "rates": told == rates,
            "steps": [ended.global_step, expected["global_step"]],
            "loss": [ended.training_loss, expected["training_loss"]],
            "evaluated": [
                evaluations(trainer.state.log_history),
                evaluations(expected["log_history"]),
            ],
            "best": trainer.state.best_global_step,
        }
        Path(folder, f"{case}-{step}-{world.rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
