"""The ledger of samples as the trainer keeps it: a row per step in memory, a segment per save.

A step costs one tuple. Rows are written and chained when a checkpoint is saved, and a save that
failed gives its rows back: the segment of the next one holds them.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from resilient.format.ledger import Anchor, Place, Segment, row_of
from resilient.train.rows import Ahead, Entry, Skip, Steps, rows_of
from resilient.vault.ledger.orders import order_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from resilient.format.names import CheckpointId
    from resilient.train.data.sampling import Cursor, Deal
    from resilient.vault.reading.choose import Resumed

    Means = Callable[[list[list[Any]]], list[float]]

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
        self._chain = Anchor("", "", 0, Place())
        self._entries: list[Entry] = []
        self._unread: list[list[Any]] = []
        self._losses: list[float] = []
        self._unsure: tuple[Anchor, list[Entry], list[float]] | None = None
        self._order: tuple[int, int, str] | None = None
        self._ahead = Ahead()

    def begin(self, resumed: Resumed | None, step: int, cursor: Cursor) -> None:
        """Go on from the checkpoint that this life began from, or begin here if it has no ledger.

        What was noted and not saved is forgotten: those steps are given up.

        Raises:
            IntegrityError: what its manifest says of the ledger makes no sense.
        """
        anchor = Anchor.from_data(resumed.data) if resumed else None
        self._chain = anchor or Anchor("", "", 0, Place(step, cursor.epoch, cursor.samples))
        self._entries, self._unread, self._losses = [], [], []
        self._unsure = self._order = None

    def see_order(self, cursor: Cursor, kind: str, order: torch.Tensor | None) -> None:
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
        cursor: Cursor,
        deal: Deal,
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
                Steps(
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
        self, cursor: Cursor, reason: str, *, until: tuple[int, int] | None = None
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
            self._entries.append(Skip(cursor.epoch, cursor.samples, stop, reason))
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
            if isinstance(one, (Skip, str)):
                folded.append(one)
                continue
            folded.append(_sum_of(one))
            weighed = sum(next(read) * part.steps for part in one)
            losses.append(weighed / sum(part.steps for part in one))
        self._entries, self._losses = folded, losses


def _stretch(cursor: Cursor, until: tuple[int, int], reason: str) -> Iterable[Skip | str]:
    """Yield what is left out from the cursor to ``until``: epoch, and samples of it.

    An epoch of which no sample was seen has no order in the ledger yet, and so no size.
    """
    epoch, start = cursor.epoch, cursor.samples
    while (epoch, start) < until:
        stop = cursor.size if epoch < until[0] else until[1]
        if not start:
            yield row_of("order", epoch, cursor.size, cursor.seed, "unknown", "")
        if start < stop:
            yield Skip(epoch, start, stop, reason)
        epoch, start = epoch + 1, 0


def _runs(entries: Iterable[Entry]) -> Iterable[list[Steps] | Skip | str]:
    """Yield rows as they are, and steps of one kind by up to ``FOLDED``."""
    for kind, some in groupby(entries, _kind):
        if kind is None:
            yield from (one for one in some if not isinstance(one, Steps))
            continue
        steps = [one for one in some if isinstance(one, Steps)]
        for first in range(0, len(steps), FOLDED):
            yield steps[first : first + FOLDED]


def _kind(entry: Entry) -> tuple[int, int, int] | None:
    return (entry.epoch, entry.batch, entry.seats) if isinstance(entry, Steps) else None


def _sum_of(steps: list[Steps]) -> Steps:
    first, last = steps[0], steps[-1]
    return Steps(
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
