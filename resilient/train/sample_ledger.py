"""Sample ledger of a run: one row for the samples of each step, one segment of rows per save.

A step adds one row in memory. When a checkpoint is saved, the new rows are written as a segment,
which continues the hash chain of the earlier segments. If the save fails, its rows become part of
the next segment.
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
    """Samples of one optimizer step, or of several consecutive steps.

    Attributes:
        last: Number of the last step.
        epoch: Epoch of the samples.
        start: Samples of the epoch that were consumed before these steps.
        stop: Samples of the epoch that are consumed after these steps.
        rounds: Micro-batches of each rank, over all these steps.
        batch: Samples per micro-batch.
        seats: Micro-batches of a round: one for each rank, or one for each leaf of the tree in
            which gradients are reduced.
        ranks: Number of ranks that have samples of their own.
        updates: Number of the steps that changed the model.
        steps: Number of steps.
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
    """Range of an epoch that training skipped on purpose."""

    epoch: int
    start: int
    stop: int
    reason: str


Entry = StepRecord | SkipRecord | str


def rows_of(
    place: LedgerPosition, entries: Iterable[Entry], losses: Iterable[float]
) -> tuple[list[str], LedgerPosition]:
    """Return entries as the records of a segment, and their end position.

    Args:
        place: Position at which the entries begin.
        entries: Recorded entries.
        losses: One loss for each step among the entries.
    """
    rows, loss_iterator = [], iter(losses)
    for entry in entries:
        if isinstance(entry, str):
            rows.append(entry)
            continue
        if isinstance(entry, SkipRecord):
            rows.append(row_of("skip", *entry))
            place = LedgerPosition(place.step, entry.epoch, entry.stop)
            continue
        rows.append(step_row(place, entry[:-1], next(loss_iterator)))
        place = LedgerPosition(entry.last, entry.epoch, entry.stop)
    return rows, place


class PendingSegment:
    """Segment that the next save would write; each call extends it by the new rows."""

    def __init__(self) -> None:
        self._source: tuple[LedgerHead, list[Entry]] | None = None
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
        """Return the segment of all entries; it contains only the last link of the hash chain.

        Args:
            checkpoint: Checkpoint that the segment would belong to.
            run_id: ID of the run.
            chain: Chain head at which the segment begins.
            entries: Entries since the chain head; the same list object as in the last call if the
                list only grew.
            losses: One loss for each step among the entries.
        """
        header = (run_id, checkpoint, chain.segment, chain.head, chain.place)
        if self._source is None or self._source[0] is not chain or self._source[1] is not entries:
            self._source, self._rows = (chain, entries), []
            self._entries = self._losses = 0
            self._place = chain.place
            self._link = Segment(*header, chain.place, chain.records, ()).opening
        new_entries = entries[self._entries :]
        rows, self._place = rows_of(self._place, new_entries, losses[self._losses :])
        self._entries += len(new_entries)
        self._losses += sum(isinstance(record, StepRecord) for record in new_entries)
        *_, self._link = (self._link, *extend_chain(self._link, checkpoint.generation, rows))
        self._rows += rows
        records = tuple(self._rows)
        return Segment(*header, self._place, chain.records, records, (), self._link)


SETTLED_EVERY = 4096
"""Maximum number of steps between two reads of losses, which limits the values on the device."""
ENTRIES_MAX = 1 << 17
MERGED_STEPS = 64
"""Steps per merged record, if more than ``ENTRIES_MAX`` entries wait for the next save."""


class Ledger:
    """Recorder of each step's samples, which closes a segment for each save.

    Args:
        is_kept: Whether this rank keeps the records; the coordinator's are stored.
        ranks: Number of ranks that have samples of their own.
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
        """Continue the ledger of the resumed checkpoint, or begin a new ledger.

        Unsaved records are dropped, because their steps are lost.

        Raises:
            IntegrityError: The manifest's data about the ledger is invalid.
        """
        anchor = LedgerHead.from_data(resumed.data) if resumed else None
        self._chain = anchor or LedgerHead(
            "", "", 0, LedgerPosition(step, cursor.epoch, cursor.samples)
        )
        self._entries, self._unread, self._losses = [], [], []
        self._unsure = self._order = None

    def see_order(self, cursor: DataCursor, kind: str, order: torch.Tensor | None) -> None:
        """Record the order of the cursor's epoch.

        Args:
            cursor: Position in the data.
            kind: Kind of sampling.
            order: Indices, int64, shape (samples,); None if unknown.
        """
        if not self._is_kept:
            return
        digest = "" if order is None else order_digest(order.numpy())
        current_order = (cursor.epoch, cursor.size, digest)
        if current_order != self._order:
            self._order = current_order
            self._entries.append(
                row_of("order", cursor.epoch, cursor.size, cursor.seed, kind, digest)
            )

    def end_step(  # noqa: PLR0913 - what a record holds
        self,
        step: int,
        start: int,
        cursor: DataCursor,
        layout: BatchLayout,
        rounds: int,
        losses: list[Any],
        *,
        updated: bool,
    ) -> bool:
        """Record a step; return whether all ranks must read losses now.

        Args:
            step: Number of the step.
            start: Samples of the epoch that were consumed before it.
            cursor: Position after it.
            layout: Batch layout.
            rounds: Number of micro-batches of each rank.
            losses: Losses of this rank's micro-batches, numbers or scalars on the device.
            updated: Whether the model changed.
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
                    layout.batch,
                    layout.ranks,
                    self._ranks,
                    int(updated),
                )
            )
        return len(self._unread) >= SETTLED_EVERY

    def leave_out(
        self, cursor: DataCursor, reason: str, *, until: tuple[int, int] | None = None
    ) -> None:
        """Record that samples are skipped on purpose, from the cursor's position.

        Args:
            cursor: Position; it does not change.
            reason: Reason in a few words.
            until: Epoch, and samples of it; None: the end of the cursor's epoch.
        """
        if not self._is_kept:
            return
        if until is None:
            stop = max(cursor.samples, cursor.size)
            self._entries.append(SkipRecord(cursor.epoch, cursor.samples, stop, reason))
        else:
            self._entries += _skipped_ranges(cursor, until, reason)

    def settle(self, means: Means) -> list[float]:
        """Read the recorded losses and return one per step. Collective.

        Args:
            means: Function from per-step lists of losses to their means over ranks.
        """
        unread, self._unread = self._unread, []
        losses = means(unread) if unread else []
        if self._is_kept:
            self._losses += losses
            if len(self._entries) > ENTRIES_MAX:
                self._merge_entries()
        return losses

    def close(self, checkpoint: CheckpointId, run_id: str) -> Segment | None:
        """Return the segment of a checkpoint.

        The previous save must be durable, and losses must be settled. The rows are dropped at the
        next call, or restored by ``reopen``.

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
        """Return the segment of ``close`` without links, and keep all rows.

        Losses must be settled.

        Crash: nothing was stored.
        """
        if not self._is_kept:
            return None
        return self._ahead.segment(checkpoint, run_id, self._chain, self._entries, self._losses)

    def reopen(self) -> None:
        """Add the rows of a failed save to the next segment."""
        if self._unsure is None:
            return
        self._chain, entries, losses = self._unsure
        self._entries, self._losses = entries + self._entries, losses + self._losses
        self._unsure = None

    def _merge_entries(self) -> None:
        """Merge records of several steps, so that a run that never saves needs no more memory."""
        loss_iterator, folded, losses = iter(self._losses), list[Entry](), list[float]()
        for run in _runs(self._entries):
            if isinstance(run, (SkipRecord, str)):
                folded.append(run)
                continue
            folded.append(_sum_of(run))
            weighed = sum(next(loss_iterator) * part.steps for part in run)
            losses.append(weighed / sum(part.steps for part in run))
        self._entries, self._losses = folded, losses


def _skipped_ranges(
    cursor: DataCursor, until: tuple[int, int], reason: str
) -> Iterable[SkipRecord | str]:
    """Yield the skipped ranges from the cursor to ``until``: epoch, and samples of it.

    An epoch without a used sample has no order in the ledger yet, so its size is unknown.
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
    """Yield groups of up to ``MERGED_STEPS`` steps of one kind, and other entries unchanged."""
    for kind, entries_of_kind in groupby(entries, _kind):
        if kind is None:
            yield from (record for record in entries_of_kind if not isinstance(record, StepRecord))
            continue
        steps = [record for record in entries_of_kind if isinstance(record, StepRecord)]
        for first in range(0, len(steps), MERGED_STEPS):
            yield steps[first : first + MERGED_STEPS]


def _kind(entry: Entry) -> tuple[int, int, int] | None:
    return (entry.epoch, entry.batch, entry.seats) if isinstance(entry, StepRecord) else None


def _sum_of(steps: list[StepRecord]) -> StepRecord:
    first_step, last_step = steps[0], steps[-1]
    return StepRecord(
        last_step.last,
        first_step.epoch,
        first_step.start,
        last_step.stop,
        sum(step.rounds for step in steps),
        first_step.batch,
        first_step.seats,
        first_step.ranks,
        sum(step.updates for step in steps),
        sum(step.steps for step in steps),
    )
