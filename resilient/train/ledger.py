"""Sample ledger of the run.

What a ledger notes in memory, and the records that it becomes.

The ledger of samples as the trainer keeps it: a row per step in memory, a segment per save.

A step costs one tuple. Rows are written and chained when a checkpoint is saved, and a save that
failed gives its rows back: the segment of the next one holds them.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.checkpoint.ledger_segments import order_digest
from resilient.format.ledger import (
    LedgerHead,
    LedgerPosition,
    Segment,
    extend_chain,
    row_of,
    step_row,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from resilient.checkpoint.resume_selection import ResumeResult
    from resilient.format.keys import CheckpointId
    from resilient.train.data.sampler import BatchLayout, DataCursor

    Means = Callable[[list[list[Any]]], list[float]]


class StepRecord(NamedTuple):
    """What one optimizer step used up, or several in a row.

    Attributes:
        last: number of the last of them.
        epoch: of the samples.
        start: samples of the epoch that were used up before.
        stop: those that are used up now.
        rounds: micro-batches of each rank, of all these steps.
        batch: samples per micro-batch.
        seats: micro-batches of a round: one for each rank, or for each leaf of the tree in which
            gradients are joined.
        ranks: that have samples of their own.
        updates: how many of the steps changed the model.
        steps: how many steps.
    """

    last: int
    epoch: int
    start: int
    stop: int
    rounds: int
    batch: int
    seats: int
    ranks: int
    updates: int
    steps: int = 1


class SkipRecord(NamedTuple):
    """A stretch of an epoch that is left out on purpose."""

    epoch: int
    start: int
    stop: int
    reason: str


Entry = StepRecord | SkipRecord | str


def rows_of(
    place: LedgerPosition, entries: Iterable[Entry], losses: Iterable[float]
) -> tuple[list[str], LedgerPosition]:
    """Return entries as the records of a segment, and where they end.

    Args:
        place: where they begin.
        entries: what was noted.
        losses: one for each step among them.
    """
    rows, read = [], iter(losses)
    for one in entries:
        if isinstance(one, str):
            rows.append(one)
            continue
        if isinstance(one, SkipRecord):
            rows.append(row_of("skip", *one))
            place = LedgerPosition(place.step, one.epoch, one.stop)
            continue
        rows.append(step_row(place, one[:-1], next(read)))
        place = LedgerPosition(one.last, one.epoch, one.stop)
    return rows, place


class PendingSegment:
    """The segment that the next save would put, a few rows longer each time it is asked for."""

    def __init__(self) -> None:
        self._of: tuple[LedgerHead, list[Entry]] | None = None
        self._rows: list[str] = []
        self._place = LedgerPosition()
        self._link = ""
        self._entries = self._losses = 0

    def segment(
        self,
        checkpoint: CheckpointId,
        run_id: str,
        chain: LedgerHead,
        entries: list[Entry],
        losses: list[float],
    ) -> Segment:
        """Return the segment of all entries, whose links nobody has kept but the last.

        Args:
            checkpoint: whose it would be.
            run_id: of the run.
            chain: where it begins.
            entries: what was noted since; the same list as last time, if it only got longer.
            losses: one for each step among them.
        """
        said = (run_id, checkpoint, chain.segment, chain.head, chain.place)
        if self._of is None or self._of[0] is not chain or self._of[1] is not entries:
            self._of, self._rows = (chain, entries), []
            self._entries = self._losses = 0
            self._place = chain.place
            self._link = Segment(*said, chain.place, chain.records, ()).opening
        new = entries[self._entries :]
        rows, self._place = rows_of(self._place, new, losses[self._losses :])
        self._entries += len(new)
        self._losses += sum(isinstance(one, StepRecord) for one in new)
        *_, self._link = (self._link, *extend_chain(self._link, checkpoint.generation, rows))
        self._rows += rows
        records = tuple(self._rows)
        return Segment(*said, self._place, chain.records, records, (), self._link)


SETTLED_EVERY = 4096
"""Steps after which losses are read, so that what waits on the device is bounded."""
ENTRIES_MAX = 1 << 17
FOLDED = 64
"""With more than ``ENTRIES_MAX`` steps between two saves, so many of them share a record."""


class Ledger:
    """Notes what each step trains on, and closes a segment for each save.

    Args:
        is_kept: whether this rank keeps the records: the coordinator's are stored.
        ranks: that have samples of their own.
    """

    def __init__(self, *, is_kept: bool, ranks: int) -> None:
        self._is_kept = is_kept
        self._ranks = ranks
        self._chain = LedgerHead("", "", 0, LedgerPosition())
        self._entries: list[Entry] = []
        self._unread: list[list[Any]] = []
        self._losses: list[float] = []
        self._unsure: tuple[LedgerHead, list[Entry], list[float]] | None = None
        self._order: tuple[int, int, str] | None = None
        self._ahead = PendingSegment()

    def begin(self, resumed: ResumeResult | None, step: int, cursor: DataCursor) -> None:
        """Go on from the checkpoint that this life began from, or begin here if it has no ledger.

        What was noted and not saved is forgotten: those steps are given up.

        Raises:
            IntegrityError: what its manifest says of the ledger makes no sense.
        """
        anchor = LedgerHead.from_data(resumed.data) if resumed else None
        self._chain = anchor or LedgerHead(
            "", "", 0, LedgerPosition(step, cursor.epoch, cursor.samples)
        )
        self._entries, self._unread, self._losses = [], [], []
        self._unsure = self._order = None

    def see_order(self, cursor: DataCursor, kind: str, order: torch.Tensor | None) -> None:
        """Note the order of the cursor's epoch.

        Args:
            cursor: the position.
            kind: of sampling.
            order: int64 indices, shape (samples,); None where nobody knows it.
        """
        if not self._is_kept:
            return
        digest = "" if order is None else order_digest(order.numpy())
        seen = (cursor.epoch, cursor.size, digest)
        if seen != self._order:
            self._order = seen
            self._entries.append(
                row_of("order", cursor.epoch, cursor.size, cursor.seed, kind, digest)
            )

    def end_step(  # noqa: PLR0913 - what a record holds
        self,
        step: int,
        start: int,
        cursor: DataCursor,
        deal: BatchLayout,
        rounds: int,
        losses: list[Any],
        *,
        updated: bool,
    ) -> bool:
        """Note a step; say whether losses must be read now, by all ranks together.

        Args:
            step: its number.
            start: samples of the epoch that were used up before it.
            cursor: the position after it.
            deal: how the data was cut.
            rounds: how many micro-batches of each rank it took.
            losses: of this rank's micro-batches, numbers or scalars on the device.
            updated: whether the model changed.
        """
        self._unread.append(losses)
        if self._is_kept:
            if self._order is None or self._order[0] != cursor.epoch:
                self.see_order(cursor, "stream" if not cursor.size else "unknown", None)
            self._entries.append(
                StepRecord(
                    step,
                    cursor.epoch,
                    start,
                    cursor.samples,
                    rounds,
                    deal.batch,
                    deal.ranks,
                    self._ranks,
                    int(updated),
                )
            )
        return len(self._unread) >= SETTLED_EVERY

    def leave_out(
        self, cursor: DataCursor, reason: str, *, until: tuple[int, int] | None = None
    ) -> None:
        """Note that samples are left out on purpose, from where the cursor is.

        Args:
            cursor: the position; it stays.
            reason: why, in a few words.
            until: epoch, and samples of it; None: the end of the cursor's epoch.
        """
        if not self._is_kept:
            return
        if until is None:
            stop = max(cursor.samples, cursor.size)
            self._entries.append(SkipRecord(cursor.epoch, cursor.samples, stop, reason))
        else:
            self._entries += _stretch(cursor, until, reason)

    def settle(self, means: Means) -> list[float]:
        """Read the losses that were noted, and return them, one of each step. Collective.

        Args:
            means: per-step lists of losses -> their means over ranks.
        """
        unread, self._unread = self._unread, []
        losses = means(unread) if unread else []
        if self._is_kept:
            self._losses += losses
            if len(self._entries) > ENTRIES_MAX:
                self._fold()
        return losses

    def close(self, checkpoint: CheckpointId, run_id: str) -> Segment | None:
        """Return the segment of a checkpoint; the save before it is durable.

        Losses are settled. What it holds is forgotten at the next call, or given back by
        ``reopen``.

        Crash: nothing was stored.
        """
        if not self._is_kept:
            return None
        chain, entries, losses = self._chain, self._entries, self._losses
        rows, place = rows_of(chain.place, entries, losses)
        segment = Segment(
            run_id,
            checkpoint,
            chain.segment,
            chain.head,
            chain.place,
            place,
            chain.records,
            tuple(rows),
        ).closed()
        self._unsure = (chain, entries, losses)
        self._chain, self._entries, self._losses = segment.anchor, [], []
        return segment

    def peek(self, checkpoint: CheckpointId, run_id: str) -> Segment | None:
        """Return what ``close`` would without links, and forget nothing; losses are settled.

        Crash: nothing was stored.
        """
        if not self._is_kept:
            return None
        return self._ahead.segment(checkpoint, run_id, self._chain, self._entries, self._losses)

    def reopen(self) -> None:
        """Take back what was closed for a save that failed."""
        if self._unsure is None:
            return
        self._chain, entries, losses = self._unsure
        self._entries, self._losses = entries + self._entries, losses + self._losses
        self._unsure = None

    def _fold(self) -> None:
        """Let steps share records, so that a run that never saves needs no more memory."""
        read, folded, losses = iter(self._losses), list[Entry](), list[float]()
        for one in _runs(self._entries):
            if isinstance(one, (SkipRecord, str)):
                folded.append(one)
                continue
            folded.append(_sum_of(one))
            weighed = sum(next(read) * part.steps for part in one)
            losses.append(weighed / sum(part.steps for part in one))
        self._entries, self._losses = folded, losses


def _stretch(cursor: DataCursor, until: tuple[int, int], reason: str) -> Iterable[SkipRecord | str]:
    """Yield what is left out from the cursor to ``until``: epoch, and samples of it.

    An epoch of which no sample was seen has no order in the ledger yet, and so no size.
    """
    epoch, start = cursor.epoch, cursor.samples
    while (epoch, start) < until:
        stop = cursor.size if epoch < until[0] else until[1]
        if not start:
            yield row_of("order", epoch, cursor.size, cursor.seed, "unknown", "")
        if start < stop:
            yield SkipRecord(epoch, start, stop, reason)
        epoch, start = epoch + 1, 0


def _runs(entries: Iterable[Entry]) -> Iterable[list[StepRecord] | SkipRecord | str]:
    """Yield rows as they are, and steps of one kind by up to ``FOLDED``."""
    for kind, some in groupby(entries, _kind):
        if kind is None:
            yield from (one for one in some if not isinstance(one, StepRecord))
            continue
        steps = [one for one in some if isinstance(one, StepRecord)]
        for first in range(0, len(steps), FOLDED):
            yield steps[first : first + FOLDED]


def _kind(entry: Entry) -> tuple[int, int, int] | None:
    return (entry.epoch, entry.batch, entry.seats) if isinstance(entry, StepRecord) else None


def _sum_of(steps: list[StepRecord]) -> StepRecord:
    first, last = steps[0], steps[-1]
    return StepRecord(
        last.last,
        first.epoch,
        first.start,
        last.stop,
        sum(one.rounds for one in steps),
        first.batch,
        first.seats,
        first.ranks,
        sum(one.updates for one in steps),
        sum(one.steps for one in steps),
    )
