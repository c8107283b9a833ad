"""Whether a run gets anywhere: did a life leave a checkpoint that was not there before it?"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Progress(Enum):
    """Answers that are no checkpoint."""

    UNKNOWN = "unknown"
    """The repository could not be asked."""
    UNTOLD = "untold"
    """Nobody said which repository it is."""


class ProgressLog:
    """Remembers the newest checkpoint across lives.

    Args:
        ask: returns the newest committed checkpoint, None before the first, or a
            ``Progress``; compared for equality only. Without it nothing is known.
        launches_before: how often the run was launched before this time.
    """

    def __init__(self, ask: Callable[[], object] | None, launches_before: int = 0) -> None:
        self.launches_before = launches_before
        self._ask = ask
        self.newest: object = ask() if ask else Progress.UNTOLD
        self._at_start = self.newest
        self._at_failure = self.newest

    def look(self) -> None:
        """Ask for the newest checkpoint; an unknown one does not replace a known one."""
        found = self._ask() if self._ask else Progress.UNTOLD
        if not isinstance(found, Progress) or self.newest is Progress.UNTOLD:
            self.newest = found

    def count_failure(self) -> bool:
        """Say whether a checkpoint was committed since the failure before this one.

        Without anything to ask there is no evidence of a crash loop, so the answer is yes and
        the restart budget alone limits the lives. The same holds for a checkpoint in a
        repository that was first heard of in this life: it may have been there before.
        """
        is_untold = self.newest is Progress.UNTOLD
        was_untold = self._at_failure is Progress.UNTOLD
        progressed = is_untold or (
            self.newest is not None if was_untold else self.newest != self._at_failure
        )
        self._at_failure = self.newest
        return progressed

    def resume_with(self, wish: str, life: int) -> str:
        """Return what life number ``life`` is told about resuming.

        The user's wish is for the start. Once something newer was committed, or might have
        been, starting as wished again would throw it away.
        """
        is_known = not isinstance(self.newest, Progress)
        return wish if life == 1 or (is_known and self.newest == self._at_start) else "auto"

    def describe(self) -> str:
        """Return what is safe, for a person."""
        if self.newest is Progress.UNTOLD:
            return "not known here (no --repo): what the script committed is not touched"
        if self.newest is Progress.UNKNOWN:
            return "not known (the repository does not answer): nothing committed is touched"
        if self.newest is None:
            return "no checkpoint was committed yet"
        return f"{self.newest} is committed"
