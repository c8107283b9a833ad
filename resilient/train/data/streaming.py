"""Iterable datasets.

Read a stream: all of it, from any sample on, the same in every process.

Datasets without a length: read whole by everyone, dealt by count, resumed at any sample.

The order is the stream's own. It is cut into rounds like a dataset with a length: one micro-batch
for each rank, consecutive in the stream. Every rank, and every process that loads for it, reads
the whole stream and keeps what is its own; so what is trained on depends neither on their number
nor on which of them was quick. The position is the number of samples of the pass that all ranks
have trained on, and the dataset's own state there if it has one that can be trusted.
"""

from __future__ import annotations

import copy
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.state_dict.rng_state import RandomState
from resilient.train.data.sampler import (
    BatchLayout,
    DataCursor,
    ResumableSampler,
    seed_worker,
    worker_options,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.distributed.launch_env import World
    from resilient.train.arguments import TrainingArguments

# What no longer knows its place after a resume: a buffer whose content is not in the state.
_FORGETFUL = "BufferShuffledExamplesIterable"


def is_stream(dataset: Any) -> bool:
    """Say whether a dataset can only be read from its beginning on."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


class StreamRound(NamedTuple):
    """What one rank reads of one round of a stream.

    Attributes:
        samples: this rank's.
        taken: samples of the round that are new, of all ranks.
        state: the dataset's own after the round, if it has one.
    """

    samples: list[Any]
    taken: int
    state: Any


class StreamReader(IterableDataset[StreamRound]):
    """Reads a whole stream from the cursor on and yields this rank's part of each round.

    Args:
        dataset: yields samples; told the epoch by ``set_epoch`` if it has that.
        cursor: where to begin.
        deal: how the stream is cut.
        rank: whose micro-batches are kept.
    """

    def __init__(self, dataset: Any, cursor: DataCursor, deal: BatchLayout, rank: int) -> None:
        self._dataset = dataset
        self._cursor = cursor
        self._batch, self._ranks, self._drop_last = deal.batch, deal.ranks, deal.drop_last
        self._rank = rank
        self._source: StreamSource | None = None

    def close(self) -> None:
        """Let go of what the dataset holds open while it is read here."""
        if self._source is not None:
            self._source.close()
        self._source = None

    def __iter__(self) -> Iterator[StreamRound]:
        info = get_worker_info()
        mine, workers = (info.id, info.num_workers) if info else (0, 1)
        for turn, one in enumerate(self._rounds()):
            if turn % workers == mine:
                yield one

    def _rounds(self) -> Iterator[StreamRound]:
        size, tail = self._batch * self._ranks, StreamTail(self._ranks, drop_last=self._drop_last)
        source = self._source = StreamSource(self._dataset, self._cursor)
        while samples := source.take(size):
            count = len(samples)
            if count < size:
                samples = tail.complete(samples, size)
            if samples:
                low = self._rank * self._batch
                yield StreamRound(samples[low : low + self._batch], count, source.state())
            if count < size:
                return


class StreamTail(NamedTuple):
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


class StreamSource:
    """A stream that is read on from a cursor, as if there were one reader and no one else.

    Random numbers that are drawn while a sample is read depend on its place alone, and the
    streams of this process do not see it.
    """

    def __init__(self, dataset: Any, cursor: DataCursor) -> None:
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


@dataclass(slots=True)
class StreamBatchLayout(BatchLayout):
    """How a stream is cut; ``samples`` is 0, and its end is known when it comes.

    Attributes:
        rounds: of the whole run, which a fraction of a pass is told in, as Transformers does.
        accumulation: micro-batches per step and rank.
        ahead: what was fetched of the pass.
    """

    rounds: int = 1
    accumulation: int = 1
    ahead: MicroBatchPrefetch | None = None

    def rounds_after(self, taken: int) -> int:
        """Return the rounds that are sure to come, up to one step of them; 0 at the end."""
        if self.ahead is None or self.ahead.place != taken:
            return 1  # nobody has looked yet
        return self.ahead.fill(self.accumulation)

    def fraction(self, taken: int) -> float:
        """Return how much of the run ``taken`` samples of a pass are."""
        return taken / self.round_samples / self.rounds


@dataclass(slots=True)
class StreamCursor(DataCursor):
    """Where the whole job is in a stream.

    Attributes:
        state: the dataset's own state there, or None.
    """

    state: Any = None

    def advance(self, deal: Any) -> None:
        """Count one round as trained on."""
        taken, self.state = deal.ahead.trained()
        self.samples += taken

    def next_epoch(self) -> None:
        """Go to the start of the next pass."""
        DataCursor.next_epoch(self)
        self.state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on every rank."""
        return {**DataCursor.state_dict(self), "stream": {"state": self.state}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back a position.

        Raises:
            IncompatibleCheckpoint: it is a position in a dataset with a length.
        """
        if "stream" not in state_dict:
            raise IncompatibleCheckpoint(
                "the checkpoint is at a place in a dataset with a length, and this one is a stream",
                hint="train on the same data, or start a new run in another `output_dir`",
            )
        DataCursor.load_state_dict(self, state_dict)
        self.state = state_dict["stream"]["state"]


class MicroBatchPrefetch:
    """A step's micro-batches, fetched to see whether there are so many.

    Args:
        rounds: collated rounds of this rank: (batch, samples of all ranks, state).
        place: samples of the pass that were trained on before, and then those since.
        what: names the dataset, for messages.
    """

    def __init__(self, rounds: Iterator[tuple[Any, int, Any]], place: int, what: str) -> None:
        self.place = place
        self._rounds = rounds
        self._what = what
        self._fetched: deque[tuple[Any, int, Any]] = deque()
        self._given: deque[tuple[int, Any]] = deque()

    def fill(self, wanted: int) -> int:
        """Fetch up to ``wanted`` micro-batches and return how many there are."""
        self._fetched.extend(islice(self._rounds, max(0, wanted - len(self._fetched))))
        return len(self._fetched)

    def require_any(self) -> None:
        """Refuse a stream that has nothing to train on.

        Raises:
            ConfigError: it ended at once.
        """
        if not self.fill(1):
            raise ConfigError(
                f"train_dataset `{self._what}` is empty, or holds less than one round with "
                "`dataloader_drop_last`"
            )

    def trained(self) -> tuple[int, Any]:
        """Return (samples, state) of the oldest micro-batch that was given and not yet counted."""
        taken, state = self._given.popleft()
        self.place += taken
        return taken, state

    def __iter__(self) -> MicroBatchPrefetch:
        return self

    def __next__(self) -> Any:
        if not self.fill(1):
            raise StopIteration
        batch, taken, state = self._fetched.popleft()
        self._given.append((taken, state))
        return batch


class _CollateRound:
    """Collates the samples of a round and leaves its place beside them."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, one: StreamRound) -> tuple[Any, int, Any]:
        return self._collate(one.samples), one.taken, one.state


class StreamLoader:
    """Loads a stream; each iterator begins at the cursor.

    Args:
        loader: yields collated rounds.
        reader: what it reads.
        cursor: the position.
        deal: told what was fetched ahead.
        what: names the dataset, for messages.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: StreamReader,
        cursor: StreamCursor,
        deal: StreamBatchLayout,
        what: str,
    ) -> None:
        self.loader = loader
        self._reader = reader
        self._cursor = cursor
        self._deal = deal
        self._what = what

    def close(self) -> None:
        """Stop reading: end what was fetched ahead, and who fetched it."""
        self._deal.ahead = None
        self._reader.close()

    def __iter__(self) -> MicroBatchPrefetch:
        ahead = MicroBatchPrefetch(iter(self.loader), self._cursor.samples, self._what)
        if not self._cursor.samples:
            ahead.require_any()
        self._deal.ahead = ahead
        return ahead


def place_in_stream(
    args: TrainingArguments, world: World
) -> tuple[StreamCursor, StreamBatchLayout]:
    """Return the start of a stream and how it is cut.

    Raises:
        ConfigError: the arguments need a dataset with a length.
    """
    if args.max_steps <= 0:
        raise ConfigError(
            "the train_dataset is a stream and does not say how long an epoch is: set `max_steps`"
        )
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        raise ConfigError(
            f"`train_sampling_strategy`={args.train_sampling_strategy!r} needs a train_dataset "
            "with a length: a stream is trained on in its own order"
        )
    unknown = (("auto_find_batch_size", False), ("random_numbers", "own"), ("reduction", "native"))
    for name, nothing in unknown:
        if getattr(args, name) not in (nothing, None):
            raise ConfigError(
                f"`{name}`={getattr(args, name)!r} needs a train_dataset with a length, and this "
                "is a stream: leave it out"
            )
    accumulation = args.gradient_accumulation_steps
    deal = StreamBatchLayout(
        samples=0,
        batch=args.per_device_train_batch_size,
        ranks=world.size,
        drop_last=args.dataloader_drop_last,
        rounds=args.max_steps * accumulation,
        accumulation=accumulation,
    )
    return StreamCursor(0, args.order_seed), deal


def stream_loader(
    args: TrainingArguments,
    dataset: Any,
    sampler: ResumableSampler,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
) -> StreamLoader:
    """Return a loader whose every iterator begins at the sampler's cursor."""
    cursor: Any = sampler.cursor
    deal: Any = sampler.deal
    reader = StreamReader(dataset, cursor, deal, sampler.rank)
    options = stream_options(args, pin=pin)
    loader = DataLoader(
        reader, batch_size=None, collate_fn=cast("Any", _CollateRound(collate)), **options
    )
    return StreamLoader(loader, reader, cursor, deal, type(dataset).__name__)


def stream_options(args: TrainingArguments, *, pin: bool) -> dict[str, Any]:
    """Return the arguments of DataLoader; its processes end with a pass, to begin anew in the next.

    The generator keeps torch from drawing from the global stream.
    """
    options = worker_options(args, pin=pin)
    generator = torch.Generator().manual_seed(args.order_seed)
    return {**options, "persistent_workers": False, "generator": generator}
