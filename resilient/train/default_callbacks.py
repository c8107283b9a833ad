"""Which callbacks a trainer has before anybody gives it one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from resilient.train.callbacks.bars import ProgressCallback
from resilient.train.callbacks.callback import DefaultFlowCallback
from resilient.train.callbacks.watching import EmptyCacheCallback

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.train.arguments import TrainingArguments
    from resilient.train.callbacks.callback import TrainerCallback


def default_callbacks(
    args: TrainingArguments, more: Iterable[TrainerCallback | type[TrainerCallback]]
) -> list[TrainerCallback | type[TrainerCallback]]:
    """Return the built-in callbacks around those of the user, in the field's order."""
    wants_bar = not args.disable_tqdm if args.disable_tqdm is not None else sys.stderr.isatty()
    return [
        DefaultFlowCallback,
        *_trackers(args),
        *more,
        *([EmptyCacheCallback] if args.torch_empty_cache_steps else []),
        *([ProgressCallback] if wants_bar else []),
    ]


def _trackers(args: TrainingArguments) -> list[TrainerCallback]:
    """Return what reports to trackers, which nobody pays for who has none."""
    if not args.report_to:
        return []
    from resilient.train.trackers.choose import ReportTo

    return [ReportTo(list(args.report_to))]
