"""Read a stream: all of it, from any sample on, the same in every process."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from resilient.state.rng import RandomState
from resilient.train.data.sampling import seed_worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.train.data.sampling import Cursor, Deal

# What no longer knows its place after a resume: a buffer whose content is not in the state.
_FORGETFUL = "BufferShuffledExamplesIterable"


def is_stream(dataset: Any) -> bool:
    """Say whether a dataset can only be read from its beginning on."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


class Round(NamedTuple):
    """What one rank reads of one round of a stream.

    Attributes:
        samples: this rank's.
        taken: samples of the round that are new, of all ranks.
        state: the dataset's own after the round, if it has one.
    """

    samples: list[Any]
    taken: int
    state: Any


class StreamReader(IterableDataset[Round]):
    """Reads a whole stream from the cursor on and yields this rank's part of each round.

    Args:
        dataset: yields samples; told the epoch by ``set_epoch`` if it has that.
        cursor: where to begin.
        deal: how the stream is cut.
        rank: whose micro-batches are kept.
    """

    def __init__(self, dataset: Any, cursor: Cursor, deal: Deal, rank: int) -> None:
        self._dataset = dataset
        self._cursor = cursor
        self._batch, self._ranks, self._drop_last = deal.batch, deal.ranks, deal.drop_last
        self._rank = rank
        self._source: Source | None = None

    def close(self) -> None:
        """Let go of what the dataset holds open while it is read here."""
        if self._source is not None:
            self._source.close()
        self._source = None

    def __iter__(self) -> Iterator[Round]:
        info = get_worker_info()
        mine, workers = (info.id, info.num_workers) if info else (0, 1)
        for turn, one in enumerate(self._rounds()):
            if turn % workers == mine:
                yield one

    def _rounds(self) -> Iterator[Round]:
        size, tail = self._batch * self._ranks, Tail(self._ranks, drop_last=self._drop_last)
        source = self._source = Source(self._dataset, self._cursor)
        while samples := source.take(size):
            count = len(samples)
            if count < size:
                samples = tail.complete(samples, size)
            if samples:
                low = self._rank * self._batch
                yield Round(samples[low : low + self._batch], count, source.state())
            if count < size:
                return


class Tail(NamedTuple):
    """What is made of an incomplete last round."""

    ranks: int
    drop_last: bool

    def complete(self, samples: list[Any], size: int) -> list[Any]:
        """Return a whole round: its samples come again, as its beginning is read and gone.

        A single rank takes what is left.
        """
        if self.drop_last:
            return []
        if self.ranks == 1:
            return samples
        return [samples[place % len(samples)] for place in range(size)]


class Source:
    """A stream that is read on from a cursor, as if there were one reader and no one else.

    Random numbers that are drawn while a sample is read depend on its place alone, and the
    streams of this process do not see it.
    """

    def __init__(self, dataset: Any, cursor: Cursor) -> None:
        self._key = (cursor.seed, cursor.epoch)
        self._place = 0
        state = getattr(cursor, "state", None)
        with _alone():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(cursor.epoch)
            holder = dataset if _has_state(dataset) else None
            if state is not None and holder is not None:
                holder.load_state_dict(copy.deepcopy(state))
            seed_worker(self._key)
            self._iterator = iter(dataset)
            if holder is None and _has_state(self._iterator):
                holder = self._iterator
                if state is not None:
                    holder.load_state_dict(copy.deepcopy(state))
        self._holder = holder
        if state is not None and holder is not None:
            self._place = cursor.samples
        else:
            self._skip(cursor.samples)

    def take(self, wanted: int) -> list[Any]:
        """Return the next samples, fewer at the end."""
        taken: list[Any] = []
        with _alone():
            for _ in range(wanted):
                seed_worker((*self._key, self._place))
                try:
                    taken.append(next(self._iterator))
                except StopIteration:
                    break
                self._place += 1
        return taken

    def state(self) -> Any:
        """Return a copy of the dataset's state at this place, None if it has none."""
        return None if self._holder is None else copy.deepcopy(self._holder.state_dict())

    def close(self) -> None:
        """End a generator that was not read to its end, and the threads that it may have."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()

    def _skip(self, samples: int) -> None:
        """Read what was trained on, and forget it."""
        while self._place < samples and self.take(1):
            pass


@contextmanager
def _alone() -> Iterator[None]:
    """Hide from a dataset that there are several readers, and its draws from this process.

    A dataset that deals itself among the processes of a loader would be dealt twice.
    """
    info = torch_worker._worker_info  # noqa: SLF001 - torch has no other way to say it
    random_state = None if info else RandomState().state_dict()
    torch_worker._worker_info = None  # noqa: SLF001 - as above
    try:
        yield
    finally:
        torch_worker._worker_info = info  # noqa: SLF001 - as above
        if random_state is not None:
            RandomState().load_state_dict(random_state)


def _has_state(holder: Any) -> bool:
    """Say whether a dataset or an iterator can be put where it was, to the sample."""
    if not (hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")):
        return False
    formatting = getattr(holder, "_formatting", None)
    if formatting is not None and getattr(formatting, "is_table", False):
        return False
    inner = getattr(holder, "_ex_iterable", None)
    while inner is not None:
        if type(inner).__name__ == _FORGETFUL or hasattr(inner, "ex_iterables"):
            return False
        inner = getattr(inner, "ex_iterable", None)
    return True
