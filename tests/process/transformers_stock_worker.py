"""What stock Transformers makes of recorded runs on this machine, one JSON file per run.

transformers_stock_worker.py FOLDER CASE:STEP...     # new: from the start
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

from tests.helpers.hf_runs import checkpoint_of, make, recording, stock_file


def main(folder, *runs):
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    for run in runs:
        case, _, step = run.partition(":")
        callbacks = [EarlyStoppingCallback(3, 0.001)] if case == "reg_earlystop" else []
        theirs = {"report_to": "none", "label_names": ["labels"], "save_strategy": "no"}
        if case in {"reg_earlystop", "gpt2_single"}:
            theirs["load_best_model_at_end"] = False
        trainer = make(
            case,
            Path(folder) / f"stock-{case}-{step}",
            kind=recording(Trainer),
            arguments=TrainingArguments,
            callbacks=callbacks,
            **theirs,
        )
        trainer.train(None if step == "new" else str(checkpoint_of(case, step)))
        stock_file(folder, case, step, rank).write_text(json.dumps(trainer.seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
