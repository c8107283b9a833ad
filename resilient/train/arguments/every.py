"""``save_every``: when checkpoints are made, in time or by what they cost (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.accounting.every import parse_every
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from resilient.train.arguments.arguments import TrainingArguments


def settle_every(args: TrainingArguments) -> None:
    """Turn a number of steps into ``save_steps``, which says the same.

    Raises:
        ConfigError: ``save_every`` says nothing that is known.
    """
    if args.save_every:
        args.save_steps = parse_every(args.save_every, "`save_every`").steps or args.save_steps


def is_planned(args: TrainingArguments) -> bool:
    """Say whether the steps of saves follow from what is measured."""
    return bool(args.save_every) and not parse_every(args.save_every, "`save_every`").steps


def check_every(args: TrainingArguments) -> None:
    """Refuse what asks for saves at other moments than ``save_every``.

    Raises:
        ConfigError: names the argument that contradicts it.
    """
    if not args.save_every:
        return
    said = f"`save_every`={args.save_every!r} (or --every)"
    if args.save_strategy != "steps":
        raise ConfigError(
            f"{said} contradicts `save_strategy`={args.save_strategy!r}: leave one of them out"
        )
    if args.load_best_model_at_end and is_planned(args):
        raise ConfigError(
            f"`load_best_model_at_end` needs a checkpoint of every evaluated model, and {said} "
            "saves when time has passed: say how often to save in steps, or use "
            "`save_strategy`='best' without it"
        )
