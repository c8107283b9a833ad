"""The checkpoints that one life has begun to save: each step once, and none below another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId


class Handed:
    """Remembers what was handed to be persisted."""

    def __init__(self) -> None:
        self._all: set[CheckpointId] = set()

    def claim(self, checkpoint: CheckpointId) -> CheckpointId:
        """Return a checkpoint that may be saved.

        Crash: nothing was stored.

        Raises:
            ConfigError: this life has saved it, or tried to, or has saved a higher step.
        """
        if checkpoint in self._all:
            raise ConfigError(
                f"step {checkpoint.step} is saved already as {checkpoint}, or that save failed and "
                "may be committed all the same; a step is saved once in a life",
                hint="none but to count the step up before the next save, or to leave this one out",
            )
        newest = max(self._all, default=checkpoint)
        if checkpoint < newest:
            raise ConfigError(
                f"step {checkpoint.step} comes after step {newest.step} was saved: the highest "
                "of a life is its newest, so nobody would resume this one",
                hint="none but to count steps over all epochs, and to go back only by resuming",
            )
        return checkpoint

    def add(self, checkpoint: CheckpointId) -> None:
        """Remember that it was handed over.

        Crash: nothing was stored.
        """
        self._all.add(checkpoint)
