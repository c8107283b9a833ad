"""The signs of progress of a loop that says no more than the steps of its optimizer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from resilient.world.compilers import showing_compilers
from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from resilient.world.pulse import During, Pulse


class LoopBeat:
    """Shows a loop's progress for it, until it calls ``resilient.heartbeat`` and shows its own.

    Nobody knows what a loop does between two steps of its optimizer, so that has the patience of
    what is no step; an adapter that is told when a step begins says so, and it has a step's.

    Args:
        pulse: of this process.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._step = 0
        self._compilers = ExitStack()

    def start(self, step: int) -> None:
        """Show that training begins after ``step``."""
        self._step = step
        self._compilers.enter_context(showing_compilers(self._pulse))
        if not self._pulse.is_told:
            self._pulse.enter(Phase.FIRST)

    @property
    def steps(self) -> int:
        """Number of the last step that the optimizer made."""
        return self._step

    def begin_step(self) -> None:
        """Show that a step begins."""
        if not self._pulse.is_told:
            self._pulse.begin_step()

    def end_step(self, *_: Any) -> None:
        """Show that the optimizer has made a step."""
        self._step += 1
        if not self._pulse.is_told:
            self._pulse.count_step(self._step)

    def between(self) -> None:
        """Show that something begins or goes on that is no step.

        Outside training it stays outside, and before the first step is done it is a part of that.
        """
        if not self._pulse.is_told:
            phase = self._pulse.phase
            self._pulse.enter(phase if phase in (Phase.OUTSIDE, Phase.FIRST) else Phase.BETWEEN)

    def saving(self) -> During:
        """Be saving inside."""
        return self._pulse.during(Phase.SAVING)

    def stop(self) -> None:
        """Show that training is over."""
        self._compilers.close()
        if not self._pulse.is_told:
            self._pulse.enter(Phase.OUTSIDE)
