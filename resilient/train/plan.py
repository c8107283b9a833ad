"""How many optimizer steps a run has (pure)."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.sampling import Cursor, Deal


def steps_after(deal: Deal, taken: int, accumulation: int) -> int:
    """Return the optimizer steps left in an epoch of which ``taken`` samples are consumed.

    The last group of micro-batches of an epoch may be short (Transformers' rule).
    """
    return math.ceil(deal.rounds_after(taken) / accumulation)


def planned_steps(args: TrainingArguments, deal: Deal, cursor: Cursor, done: int) -> int:
    """Return the number of the run's last step, seen from ``cursor`` after ``done`` steps.

    A run over epochs ends when the samples are consumed, so after a change of the batch size
    the number changes; a run with ``max_steps`` ends at that step whatever it takes.
    """
    if args.max_steps > 0:
        return args.max_steps
    accumulation = args.gradient_accumulation_steps
    per_epoch = steps_after(deal, 0, accumulation)
    into_epoch = per_epoch - steps_after(deal, cursor.samples, accumulation)
    wanted = math.ceil(args.num_train_epochs * per_epoch)
    return done + max(0, wanted - cursor.epoch * per_epoch - into_epoch)


def planned_epochs(args: TrainingArguments, deal: Deal) -> int:
    """Return the epochs that the run begins."""
    if not deal.samples:  # a stream does not say; Transformers' value
        return sys.maxsize
    if args.max_steps > 0:
        per_epoch = steps_after(deal, 0, args.gradient_accumulation_steps)
        return math.ceil(args.max_steps / per_epoch)
    return math.ceil(args.num_train_epochs)


def epoch_fraction(deal: Deal, cursor: Cursor) -> float:
    """Return the current epoch as a number with the fraction of its rounds that are done."""
    return cursor.epoch + deal.fraction(cursor.samples)
