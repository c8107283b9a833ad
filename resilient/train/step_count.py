"""Planned length of a run: numbers of the last step and the last epoch."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.sampler import BatchLayout, DataCursor


def steps_after(layout: BatchLayout, taken: int, accumulation: int) -> int:
    """Return the remaining optimizer steps of an epoch after ``taken`` samples.

    The last group of micro-batches of an epoch may be short (Transformers' rule).
    """
    return math.ceil(layout.rounds_after(taken) / accumulation)


def planned_steps(
    args: TrainingArguments, layout: BatchLayout, cursor: DataCursor, done: int
) -> int:
    """Return the number of the run's last step, computed at ``cursor`` after ``done`` steps.

    A run over epochs ends when the samples are consumed, so a change of the batch size changes
    the number. A run with ``max_steps`` ends at that step in any case.
    """
    if args.max_steps > 0:
        return args.max_steps
    accumulation = args.gradient_accumulation_steps
    per_epoch = steps_after(layout, 0, accumulation)
    into_epoch = per_epoch - steps_after(layout, cursor.samples, accumulation)
    step_count = math.ceil(args.num_train_epochs * per_epoch)
    return done + max(0, step_count - cursor.epoch * per_epoch - into_epoch)


def planned_epochs(
    args: TrainingArguments, layout: BatchLayout, cursor: DataCursor, done: int
) -> int:
    """Return the number of epochs of the run, computed at ``cursor`` after ``done`` steps.

    If a callback ends an epoch early, no other epoch becomes longer, as in Transformers.
    """
    if not layout.samples:  # The length of a stream is unknown. Transformers uses this value.
        return sys.maxsize
    if args.max_steps <= 0:
        return math.ceil(args.num_train_epochs)
    accumulation = args.gradient_accumulation_steps
    per_epoch = max(1, steps_after(layout, 0, accumulation))
    into_epoch = per_epoch - steps_after(layout, cursor.samples, accumulation)
    return cursor.epoch + math.ceil((max(0, args.max_steps - done) + into_epoch) / per_epoch)


def planned_run(
    args: TrainingArguments, layout: BatchLayout, cursor: DataCursor, done: int
) -> dict[str, Any]:
    """Return the plan for the rest of the run, and the inputs of the plan."""
    return {
        "steps": planned_steps(args, layout, cursor, done),
        "epochs": planned_epochs(args, layout, cursor, done),
        **_basis(args, layout),
    }


def is_current(
    planned: Mapping[str, Any] | None, args: TrainingArguments, layout: BatchLayout
) -> bool:
    """Return whether a saved plan has these arguments and this batch layout as inputs."""
    basis = _basis(args, layout)
    return planned is not None and {name: planned.get(name) for name in basis} == basis


def _basis(args: TrainingArguments, layout: BatchLayout) -> dict[str, Any]:
    return {
        "max_steps": args.max_steps,
        "num_train_epochs": args.num_train_epochs,
        "steps_per_epoch": steps_after(layout, 0, args.gradient_accumulation_steps),
    }


def epoch_fraction(layout: BatchLayout, cursor: DataCursor) -> float:
    """Return the current epoch as a number with the fraction of its finished rounds."""
    return cursor.epoch + layout.fraction(cursor.samples)
