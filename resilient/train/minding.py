"""What a Saver does about a loss that broke: tell it, and keep the last checkpoint before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.events import Emitter, Event
    from resilient.format.names import CheckpointId
    from resilient.train.best import Best
    from resilient.train.state import TrainerState


class MindingSaver:
    """The part of a Saver that hears of broken numbers.

    Attributes:
        best: names the checkpoints that no rotation may take.
        emit: where events go.
    """

    best: Best
    emit: Emitter
    _state: TrainerState
    _saved: CheckpointId | None
    _is_coordinator: bool

    @property
    def step(self) -> int:
        """The last optimizer step."""
        return self._state.global_step

    def mind(self, broke: Sequence[Event], *, is_broken: bool) -> None:
        """Tell how numbers broke; while they are none, keep the last checkpoint before that."""
        self.best.mind(self._saved, begins=bool(broke), is_broken=is_broken)
        for one in broke if self._is_coordinator else ():
            self.emit(one, step=self.step)
