"""The account of the run's wall clock, as figures, at a price that stays small.

Records of what happens often are joined, those of ever longer times, whenever there are too many.
An account is made ever more rarely, the longer it takes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.accounting.account import account
from resilient.accounting.steadying import present_ms
from resilient.agent.metrics import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.accounting.records import Record
    from resilient.agent.metrics.board import Board
    from resilient.clock import Clock

RECORDS_MAX = 20_000
"""Kept at once; a run of so many lives that no joining helps has no account here, but a report."""
_APART_MS_MAX = 86_400_000
_OFTEN: Mapping[str, tuple[str, ...]] = {
    "MetricsLogged": (),
    "ProgressSeen": (),
    "PhaseEnded": ("took_seconds",),
    "CheckpointCommitted": ("stall_seconds",),
}
"""What happens often, and what of it is summed."""
_KEPT = ("agent", "boot", "monotonic", "run", "host", "generation", "rank", "step", "global_step")
_EVERY_SECONDS = 5.0
_PAUSE_FACTOR = 50.0


class Spending:
    """Remembers what was told, and makes the account when it is time; one thread.

    Args:
        board: where the figures go.
        clock: time.

    Attributes:
        is_full: whether there was too much to account for; the figures are gone then.
    """

    def __init__(self, board: Board, clock: Clock) -> None:
        self.is_full = False
        self._board = board
        self._clock = clock
        self._records: list[Record] = []
        self._apart_ms = 1000
        self._due_seconds = 0.0

    def take(self, told: Iterable[Record]) -> None:
        """Remember what was told."""
        if self.is_full:
            return
        self._records += map(_slim, told)
        while len(self._records) > RECORDS_MAX and not self.is_full:
            self._thin()

    def tell(self, now_ms: int, *, is_last: bool = False) -> None:
        """Put the account on the board, if it is time for it.

        Args:
            now_ms: the time of day.
            is_last: do it now.
        """
        began_seconds = self._clock.monotonic_seconds()
        if not self._records or (began_seconds < self._due_seconds and not is_last):
            return
        found = account(self._records, present_ms(self._records, self._clock, now_ms))
        took_seconds = self._clock.monotonic_seconds() - began_seconds
        self._due_seconds = began_seconds + max(_EVERY_SECONDS, _PAUSE_FACTOR * took_seconds)
        for spent, spent_ms in found.spent_ms.items():
            self._board.put(names.SPENT, spent_ms / 1000, spent.value)
        self._board.put(names.GOODPUT, found.goodput)
        self._board.put(names.LOST_STEPS, found.lost_steps)

    def _thin(self) -> None:
        """Join what is told often; if that is no help, let go of everything."""
        self._records = join(self._records, self._apart_ms)
        if len(self._records) > RECORDS_MAX // 2:
            self._apart_ms *= 2
        self.is_full = self._apart_ms > _APART_MS_MAX
        if self.is_full:
            self._records = []
            for metric in (names.SPENT, names.GOODPUT, names.LOST_STEPS):
                self._board.drop(metric)


def join(records: Sequence[Record], apart_ms: int) -> list[Record]:
    """Return the records with those joined that a source told within ``apart_ms``, and often.

    Progress is told by the last of them. What held training up is told by the last as well, for
    the time of all, so that sums stay. Nothing is joined across the beginning or end of a life.
    """
    kept: list[Record] = []
    since: dict[tuple[str, ...], tuple[int, int]] = {}
    for one in sorted(records, key=lambda told: told.at_ms):
        if one.event not in _OFTEN:
            since.clear()
            kept.append(one)
            continue
        key = (one.event, one.source, one.agent, one.text("phase"))
        began_ms, nth = since.get(key, (one.at_ms - apart_ms, 0))
        if one.at_ms - began_ms < apart_ms:
            kept[nth] = _both(kept[nth], one)
        else:
            since[key] = (one.at_ms, len(kept))
            kept.append(one)
    return kept


def _both(first: Record, last: Record) -> Record:
    fields = dict(last.fields)
    for name in _OFTEN[last.event]:
        fields[name] = first.number(name) + last.number(name)
    if last.event == "CheckpointCommitted":
        fields["commit_seconds"] = max(last.number("commit_seconds"), fields["stall_seconds"])
    return replace(last, fields=fields)


def _slim(one: Record) -> Record:
    """Return a record without what only a report shows."""
    if one.event != "MetricsLogged":
        return one
    return replace(one, fields={name: one.fields[name] for name in _KEPT if name in one.fields})
