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
    if not args.save_every:
        return False
    every = parse_every(args.save_every, "`save_every`")
    return every.says_saves and not every.steps


def is_auto(args: TrainingArguments) -> bool:
    """Say whether the time between saves follows from what they cost."""
    return bool(args.save_every) and parse_every(args.save_every, "`save_every`").is_auto


def memory_steps(args: TrainingArguments) -> int:
    """Return after how many steps memory holds one between saves, 0 for never."""
    return parse_every(args.save_every, "`save_every`").memory_steps if args.save_every else 0


def check_every(args: TrainingArguments) -> None:
    """Refuse what asks for saves at other moments than ``save_every``.

    Raises:
        ConfigError: names the argument that contradicts it.
    """
    if not args.save_every:
        return
    said = f"`save_every`={args.save_every!r} (or --every)"
    every = parse_every(args.save_every, "`save_every`")
    if every.memory_steps:
        _check_memory(args, said)
    if args.save_strategy != "steps" and every.says_saves:
        raise ConfigError(
            f"{said} contradicts `save_strategy`={args.save_strategy!r}: leave one of them out"
        )
    if args.load_best_model_at_end and is_planned(args):
        raise ConfigError(
            f"`load_best_model_at_end` needs a checkpoint of every evaluated model, and {said} "
            "saves when time has passed: say how often to save in steps, or use "
            "`save_strategy`='best' without it"
        )


def _check_memory(args: TrainingArguments, said: str) -> None:
    """Refuse what leaves nothing to hold in memory, or another tier that takes every save.

    Raises:
        ConfigError: names the argument.
    """
    if args.save_only_model:
        raise ConfigError(f"{said} holds what a resume needs, and `save_only_model` leaves it out")
    if args.near_repo:
        raise ConfigError(
            f"{said} holds steps for `repo` alone, and `near_repo` takes every save: use one "
            "of them"
        )
    if args.save_strategy == "no":
        raise ConfigError(f"{said} contradicts `save_strategy`='no': what is held may be saved")
