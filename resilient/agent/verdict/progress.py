"""Progress of a run: checkpoints that an attempt added to the repository."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ASKING_SECONDS_MAX = 15.0
"""How long a store may take to answer, where nothing is more urgent."""


class Progress(Enum):
    """Answers that are no checkpoint."""

    UNKNOWN = "unknown"
    """The repository could not be asked."""
    UNTOLD = "untold"
    """Nobody said which repository it is."""


class ProgressLog:
    """Remembers the newest checkpoint across lives.

    Args:
        ask: takes how many seconds the answer may take, and returns the newest committed
            checkpoint, None before the first, or a ``Progress``; compared for equality only.
            Without it nothing is known.
        launches_before: how often the run was launched before this time.

    Attributes:
        newest: the last answer that was one.
        is_answered: whether the last question was.
    """

    def __init__(self, ask: Callable[[float], object] | None, launches_before: int = 0) -> None:
        self.launches_before = launches_before
        self._ask = ask
        self.newest: object = ask(ASKING_SECONDS_MAX) if ask else Progress.UNTOLD
        self.is_answered = self.newest is not Progress.UNKNOWN
        self._at_failure = self.newest

    def look(self, within_seconds: float = ASKING_SECONDS_MAX) -> None:
        """Ask for the newest checkpoint; an unknown one does not replace a known one."""
        found = self._ask(within_seconds) if self._ask else Progress.UNTOLD
        self.is_answered = found is not Progress.UNKNOWN
        if not isinstance(found, Progress) or self.newest is Progress.UNTOLD:
            self.newest = found

    def count_failure(self, *, is_brief: bool = False) -> bool | None:
        """Say whether a checkpoint was committed since the failure before this one.

        Without anything to ask there is no evidence of a crash loop but lives that hardly begin,
        so the answer is yes for others, and the restart budget alone limits those. The same holds
        for a checkpoint in a repository that was first heard from in this life: it may have been
        there before. None when the repository does not answer, which is evidence of neither.

        Args:
            is_brief: whether the life ended soon and nobody had seen a step of it.
        """
        if not self.is_answered:
            return None
        if self.newest is Progress.UNTOLD:
            return not is_brief
        was_unknown = isinstance(self._at_failure, Progress)
        progressed = self.newest is not None if was_unknown else self.newest != self._at_failure
        self._at_failure = self.newest
        return progressed

    @property
    def name_of_newest(self) -> str | None:
        """The newest checkpoint, None where nothing was committed; empty when not known."""
        if not self.is_answered or isinstance(self.newest, Progress):
            return ""
        return None if self.newest is None else str(self.newest)

    @property
    def name_of_last(self) -> str:
        """The newest checkpoint that was ever heard of; empty if none was."""
        newest = self.newest
        return "" if newest is None or isinstance(newest, Progress) else str(newest)

    def describe(self) -> str:
        """Return what is safe, for a person."""
        if self.newest is Progress.UNTOLD:
            return "not known here (no --repo): what the script committed is not touched"
        if self.newest is Progress.UNKNOWN:
            return "not known (the repository does not answer): nothing committed is touched"
        if self.newest is None:
            return "no checkpoint was committed yet"
        return f"{self.newest} is committed"
