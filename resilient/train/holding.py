"""Steps between saves that memory holds: how often, and when not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.errors import ResilientError
from resilient.holding import begin_to_hold
from resilient.train.arguments.every import memory_steps
from resilient.train.saving import WARM_AT, Saver
from resilient.vault.facts import HoldingEnded

if TYPE_CHECKING:
    from resilient.checkpointer import Checkpointer
    from resilient.holding import Holding
    from resilient.state.capture import Part
    from resilient.train.session import Session
    from resilient.vault.reading.choose import Resumed
    from resilient.world.sums import NearSums


class HoldingSaver(Saver):
    """A Saver that also holds steps in memory, if ``save_every`` says ``memory=...``."""

    _holding: Holding | None = None
    _is_on: bool | None = None
    near_sums: NearSums | None = None
    """Adds numbers of all ranks up, where they hold steps and are on one host; all have it then."""

    def __init__(
        self, checkpointer: Checkpointer, parts: dict[str, Part], *, session: Session, **more: Any
    ) -> None:
        super().__init__(checkpointer, parts, session=session, **more)
        self._lull = session.lull

    def holds(self) -> bool:
        """Say whether this step is to be held; the same on every rank."""
        return self._holds_at(self._state.global_step)

    def will_hold(self) -> bool:
        """Say whether the step that is about to update is to be held, as far as is known."""
        return self._holds_at(self._state.global_step + 1)

    def _holds_at(self, step: int) -> bool:
        steps = memory_steps(self._args)
        if not steps or step % steps or step == self._saved_step or self._is_on is False:
            return False
        # The memory of saves comes first.
        return self._updates > WARM_AT

    def hold(self) -> None:
        """Hold this step in memory; it is no checkpoint unless ranks die. Collective.

        What goes wrong on one rank is told once; then nothing is held that all of them have.
        """
        if self._is_on is None:
            self._holding = begin_to_hold(self._checkpointer, self._lull)
            self._is_on = self._holding is not None
            # The ranks go on to add so though one of them has let go of what it holds.
            self.near_sums = self._holding.near_sums if self._holding is not None else None
        if self._holding is None:
            return
        measured, peeks = self._state.measured(), self.ledger.peek
        about = replace(self._about(), metrics=measured, ledger=peeks)
        step, overlap = self._state.global_step, self._args.save_overlap
        try:
            self._holding.hold(step, self.parts, about, overlap=overlap)
        except ResilientError as error:
            self.emit(HoldingEnded(error.message))
            self._let_go(drops=True)

    def before_update(self) -> None:
        """Wait until the state may change that a save, or what is held, is still copying."""
        if self._holding is not None:
            self._holding.before_update()
        super().before_update()

    def begin_again(self, checkpointer: Checkpointer) -> Resumed | None:
        """Begin another life from a checkpoint, and forget the steps that are given up."""
        self._let_go(drops=True)
        self._is_on = self.near_sums = None
        return super().begin_again(checkpointer)

    def close(self) -> None:
        """Let go of the repository; what is held lands if it is newer than what is saved."""
        self._let_go(drops=False)
        super().close()

    def _let_go(self, *, drops: bool) -> None:
        holding, self._holding = self._holding, None
        if holding is not None:
            if drops:
                holding.drop()
            holding.close()
