"""What a ledger notes in memory, and the records that it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from resilient.format.ledger import Anchor, Place, Segment, links_after, row_of, step_row

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.format.names import CheckpointId


class Steps(NamedTuple):
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


class Skip(NamedTuple):
    """A stretch of an epoch that is left out on purpose."""

    epoch: int
    start: int
    stop: int
    reason: str


Entry = Steps | Skip | str


def rows_of(
    place: Place, entries: Iterable[Entry], losses: Iterable[float]
) -> tuple[list[str], Place]:
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
        if isinstance(one, Skip):
            rows.append(row_of("skip", *one))
            place = Place(place.step, one.epoch, one.stop)
            continue
        rows.append(step_row(place, one[:-1], next(read)))
        place = Place(one.last, one.epoch, one.stop)
    return rows, place


class Ahead:
    """The segment that the next save would put, a few rows longer each time it is asked for."""

    def __init__(self) -> None:
        self._of: tuple[Anchor, list[Entry]] | None = None
        self._rows: list[str] = []
        self._place = Place()
        self._link = ""
        self._entries = self._losses = 0

    def segment(
        self,
        checkpoint: CheckpointId,
        run_id: str,
        chain: Anchor,
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
        self._losses += sum(isinstance(one, Steps) for one in new)
        *_, self._link = (self._link, *links_after(self._link, checkpoint.generation, rows))
        self._rows += rows
        records = tuple(self._rows)
        return Segment(*said, self._place, chain.records, records, (), self._link)
