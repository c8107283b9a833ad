"""May a run go on from this checkpoint with these arguments?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import IncompatibleCheckpoint
from resilient.train.arguments.changes import changes_between, require_resumable
from resilient.train.reporting import ArgumentsChanged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.events import Emitter
    from resilient.train.arguments import TrainingArguments


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
