"""Detection of times in which the agent was suspended, frozen or had no processor time.

The agent is the process that starts and watches the workers of a host. It treats a rank as hung if
the last heartbeat of the rank is too old.

A SLURM suspend, a frozen cgroup or a debugger stops the agent and the ranks together. Later, the
processes continue in any order. The monotonic clock counts the stopped time, but no rank could
write a heartbeat in that time. The agent therefore subtracts the time in which it did not run from
the time since the last heartbeat of each rank.
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
    """Detector that counts a very late check by its owner as a suspension.

    A check itself may take long, for example in a silent store. So only the time between the end of
    one check and the start of the next counts.

    Args:
        away_seconds: Time between two checks that counts as a suspension.
    """

    def __init__(self, away_seconds: float = AWAY_SECONDS) -> None:
        self._away_seconds = away_seconds
        self._until_seconds = math.inf
        self._gaps: list[tuple[float, float]] = []

    def begin(self, now_seconds: float) -> None:
        """Clear the record and start at ``now_seconds``."""
        self._until_seconds = now_seconds
        self._gaps.clear()

    def open(self, now_seconds: float) -> float:
        """Start a check; return the length of the suspension before it, 0 for none."""
        gap_seconds = now_seconds - self._until_seconds
        before_seconds, self._until_seconds = self._until_seconds, now_seconds
        if gap_seconds <= self._away_seconds:
            return 0.0
        # Older gaps matter to no rank that has written a heartbeat since then.
        self._gaps = [*self._gaps[-_GAPS_MAX + 1 :], (before_seconds, now_seconds)]
        return gap_seconds

    def close(self, now_seconds: float) -> None:
        """End a check."""
        self._until_seconds = now_seconds

    def shifted(self, since_seconds: float) -> float:
        """Return a time, moved later by the suspensions since then."""
        gap_seconds = (max(0.0, end - max(start, since_seconds)) for start, end in self._gaps)
        return since_seconds + sum(gap_seconds)


class SuspendCorrectedProgress:
    """Heartbeats of ranks without the time in which the host was suspended.

    Args:
        suspend_detector: Detector of the suspensions.
    """

    def __init__(self, suspend_detector: SuspendDetector) -> None:
        self._suspend_detector = suspend_detector
        self._last: dict[int, ProgressRecord] = {}
        self._suspensions_by_rank: dict[int, tuple[ProgressRecord, float]] = {}
        self._suspended: dict[tuple[int, int], tuple[float, float]] = {}

    def begin(self) -> None:
        """Forget the ranks of the previous attempt."""
        self._last.clear()
        self._suspensions_by_rank.clear()
        self._suspended.clear()

    def corrected(
        self, rank: int, record: ProgressRecord, away_seconds: float = 0.0
    ) -> ProgressRecord:
        """Return a heartbeat as if its rank had never been suspended.

        Args:
            rank: Global rank of the heartbeat.
            record: Current heartbeat.
            away_seconds: Length of the suspension before this check.
        """
        if away_seconds and rank in self._last:
            self._suspensions_by_rank[rank] = self._last[rank], away_seconds
        self._last[rank] = record
        self._correct_longest_time(rank, record)
        longest = tuple(
            self._suspended[rank, phase][1]
            if self._suspended.get((rank, phase), (None,))[0] == seconds
            else seconds
            for phase, seconds in enumerate(record.longest_seconds)
        )
        since_seconds = self._suspend_detector.shifted(record.since_seconds)
        return replace(record, since_seconds=since_seconds, longest_seconds=longest)

    def _correct_longest_time(self, rank: int, record: ProgressRecord) -> None:
        """Detect a longest phase time that contains a suspension.

        Otherwise twice that time would be the deadline of later steps.
        """
        if (
            rank not in self._suspensions_by_rank
            or record.since_seconds == self._suspensions_by_rank[rank][0].since_seconds
        ):
            return
        previous_record, away_seconds = self._suspensions_by_rank.pop(rank)
        longest_seconds, now = (
            progress.longest_seconds[previous_record.phase]
            for progress in (previous_record, record)
        )
        if now > longest_seconds and now >= away_seconds:
            self._suspended[rank, previous_record.phase] = (
                now,
                max(longest_seconds, now - away_seconds),
            )
