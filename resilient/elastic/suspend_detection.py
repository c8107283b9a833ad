"""When an agent looked, and when it was away itself: suspended, frozen, or kept from running.

SLURM suspends jobs, a cgroup freezes, a debugger stops: agent and ranks stand still together, and
go on in any order. The clock that only runs forward counts that time, and nobody could have shown
a sign in it. So what an agent did not see is held against nobody.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilient.distributed.heartbeat import ProgressRecord

AWAY_SECONDS = 2.0
_GAPS_MAX = 64


class SuspendDetector:
    """Notes when its owner looks; one that looks much too late was away meanwhile.

    Looking may take its time, as a store that does not answer holds a question: only what passes
    between the end of one look and the beginning of the next one counts.

    Args:
        away_seconds: between two looks, for what is more to count as absence.
    """

    def __init__(self, away_seconds: float = AWAY_SECONDS) -> None:
        self._away_seconds = away_seconds
        self._until_seconds = math.inf
        self._gaps: list[tuple[float, float]] = []

    def begin(self, now_seconds: float) -> None:
        """Forget all, and look from now on."""
        self._until_seconds = now_seconds
        self._gaps.clear()

    def open(self, now_seconds: float) -> float:
        """Begin to look; return for how long nobody did, 0 when that is nothing unusual."""
        gap_seconds = now_seconds - self._until_seconds
        before_seconds, self._until_seconds = self._until_seconds, now_seconds
        if gap_seconds <= self._away_seconds:
            return 0.0
        # Older ones matter to nobody who showed a sign since.
        self._gaps = [*self._gaps[-_GAPS_MAX + 1 :], (before_seconds, now_seconds)]
        return gap_seconds

    def close(self, now_seconds: float) -> None:
        """End a look."""
        self._until_seconds = now_seconds

    def shifted(self, since_seconds: float) -> float:
        """Return a moment, later by as much as its owner was away since then."""
        away = (max(0.0, end - max(start, since_seconds)) for start, end in self._gaps)
        return since_seconds + sum(away)


class SuspendCorrectedProgress:
    """Takes the time in which nobody ran out of what ranks show.

    Args:
        sight: knows when that was.
    """

    def __init__(self, sight: SuspendDetector) -> None:
        self._sight = sight
        self._last: dict[int, ProgressRecord] = {}
        self._away: dict[int, tuple[ProgressRecord, float]] = {}
        self._spoiled: dict[tuple[int, int], tuple[float, float]] = {}

    def begin(self) -> None:
        """Forget the ranks of the life before."""
        self._last.clear()
        self._away.clear()
        self._spoiled.clear()

    def signs(self, rank: int, shown: ProgressRecord, away_seconds: float = 0.0) -> ProgressRecord:
        """Return signs as they were if their rank had never stood still.

        Args:
            rank: whose they are.
            shown: what it shows now.
            away_seconds: how long nobody looked, and most likely nobody ran, before this look.
        """
        if away_seconds and rank in self._last:
            self._away[rank] = self._last[rank], away_seconds
        self._last[rank] = shown
        self._look_for_spoiled(rank, shown)
        longest = tuple(
            self._spoiled[rank, phase][1]
            if self._spoiled.get((rank, phase), (None,))[0] == seconds
            else seconds
            for phase, seconds in enumerate(shown.longest_seconds)
        )
        since_seconds = self._sight.shifted(shown.since_seconds)
        return replace(shown, since_seconds=since_seconds, longest_seconds=longest)

    def _look_for_spoiled(self, rank: int, shown: ProgressRecord) -> None:
        """Once what it was in has ended, that seems to have taken as long as nobody ran, or longer.

        Twice that would be a deadline ever after.
        """
        if rank not in self._away or shown.since_seconds == self._away[rank][0].since_seconds:
            return
        before, away_seconds = self._away.pop(rank)
        known, now = (one.longest_seconds[before.phase] for one in (before, shown))
        if now > known and now >= away_seconds:
            self._spoiled[rank, before.phase] = now, max(known, now - away_seconds)
