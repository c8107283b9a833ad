"""Rules for a resume with arguments or objects that differ from the checkpoint's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from resilient.errors import IncompatibleCheckpoint
from resilient.state.changes import ChangePolicy
from resilient.train.arguments.changes import FREE, PART, changes_between, require_resumable
from resilient.train.reporting import ArgumentsChanged

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from resilient.events import Emitter
    from resilient.train.arguments import TrainingArguments

_RANK = re.compile(r"_\d+$")


def examine(config: Mapping[str, Any], args: TrainingArguments, emit: Emitter) -> None:
    """Tell how this life's arguments differ from those that saved, then refuse some.

    Args:
        config: of the run that saved.
        args: of this one.
        emit: whom to tell.

    Raises:
        ConfigError: one differs that cannot.
        IncompatibleCheckpoint: it was saved to hold the model alone.
    """
    if config.get("save_only_model"):
        raise IncompatibleCheckpoint(
            "the checkpoint holds only a model (`save_only_model`), and training cannot go on "
            "from that: take an older one that is whole, or begin anew from its weights with "
            "`trainer.load_model(...)` and `trainer.train(False)`",
            hint="resilient ckpt ls",
        )
    changes = changes_between(config, args.to_dict())
    if changes:
        emit(ArgumentsChanged(changes))
    require_resumable(changes, args.resume_changes)


def policy_for(args: TrainingArguments, known: Collection[str]) -> ChangePolicy:
    """Return which differences of objects a resume allows.

    Args:
        args: of this run; ``resume_changes`` has ``part:NAME``.
        known: names of parts that the trainer makes, and of those that the user registered.
    """
    allowed = args.resume_changes or ()

    def compares_options(config: Mapping[str, Any]) -> bool:
        # Options that follow from arguments are reported as arguments.
        changed = changes_between(config, args.to_dict()).values()
        return all(one.rule.kind == FREE for one in changed)

    def lost(held: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(one for one in held if whose_part(one) not in known))

    return ChangePolicy(
        frozenset([allowed] if isinstance(allowed, str) else allowed),
        compares_options,
        lost,
        "give the objects that saved it (trainer.register(name, thing) for a part of yours), or "
        "allow the difference: TrainingArguments(resume_changes=[{names}])",
        PART,
    )


def whose_part(name: str) -> str:
    """Return the name of a part without the number of the rank that has it."""
    return _RANK.sub("", name)
