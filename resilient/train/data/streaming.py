"""Streams: datasets without a length, which can be resumed at any sample.

Samples are used in the order of the stream. Like a dataset with a length, the stream is cut into
rounds. A round has one micro-batch for each rank, and these micro-batches are consecutive in the
stream. Every rank and every loader process reads the whole stream, and keeps only its own samples.
The trained samples therefore depend neither on the number of readers nor on their speed. The
position is the number of samples that all ranks together have trained on in the current pass over
the stream. If the dataset can save its own state and resume from it at the exact sample, the
position includes this state.
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
from resilient.train.data.loader_workers import end_workers
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

# After a resume this iterable is at a wrong position, because its state lacks the buffer.
_FORGETFUL = "BufferShuffledExamplesIterable"


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset can only be read from its beginning."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


class StreamRound(NamedTuple):
    """Share of one rank in one round of a stream.

    Attributes:
        samples: Samples of this rank.
        taken: Number of new samples of the round, over all ranks.
        state: State of the dataset after the round, if it has one.
    """

    samples: list[Any]
    taken: int
    state: Any


class StreamReader(IterableDataset[StreamRound]):
    """Reader of a stream from the cursor on, which yields this rank's share of each round.

    Args:
        dataset: Yields samples; its ``set_epoch`` is called with the epoch if it exists.
        cursor: Start position.
        layout: Batch layout of the stream.
        rank: Rank whose micro-batches are kept.
    """

    def __init__(self, dataset: Any, cursor: DataCursor, layout: BatchLayout, rank: int) -> None:
        self._dataset = dataset
        self._cursor = cursor
        self._batch, self._ranks, self._drop_last = layout.batch, layout.ranks, layout.drop_last
        self._rank = rank
        self._source: StreamSource | None = None

    def close(self) -> None:
        """Release the resources that the dataset holds open for this reader."""
        if self._source is not None:
            self._source.close()
        self._source = None

    def __iter__(self) -> Iterator[StreamRound]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for turn, stream_round in enumerate(self._rounds()):
            if turn % workers == worker:
                yield stream_round

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
    """Rule for an incomplete last round."""

    ranks: int
    drop_last: bool

    def complete(self, samples: list[Any], size: int) -> list[Any]:
        """Complete a round by repeating its own samples, because the stream cannot be reread.

        A single rank takes the remaining samples.
        """
        if self.drop_last:
            return []
        if self.ranks == 1:
            return samples
        return [samples[place % len(samples)] for place in range(size)]


class StreamSource:
    """Stream that is read from a cursor as if there were a single reader.

    Random numbers drawn while a sample is read depend only on the sample's position. The random
    streams of this process do not change.
    """

    def __init__(self, dataset: Any, cursor: DataCursor) -> None:
        self._key = (cursor.seed, cursor.epoch)
        self._place = 0
        state = getattr(cursor, "state", None)
        with _as_single_reader():
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

    def take(self, batch_count: int) -> list[Any]:
        """Return the next samples; fewer at the end."""
        samples: list[Any] = []
        with _as_single_reader():
            for _ in range(batch_count):
                seed_worker((*self._key, self._place))
                try:
                    samples.append(next(self._iterator))
                except StopIteration:
                    break
                self._place += 1
        return samples

    def state(self) -> Any:
        """Return a copy of the dataset's state at this position; None without a state."""
        return None if self._holder is None else copy.deepcopy(self._holder.state_dict())

    def close(self) -> None:
        """Close a generator that was not read to its end, with its threads."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()

    def _skip(self, samples: int) -> None:
        """Read and discard the samples that were trained on."""
        while self._place < samples and self.take(1):
            pass


@contextmanager
def _as_single_reader() -> Iterator[None]:
    """Hide other readers from a dataset, and keep the dataset's draws out of this process.

    A dataset that divides itself among loader processes would otherwise be divided twice.
    """
    info = torch_worker._worker_info  # noqa: SLF001 - torch has no public API for it
    random_state = None if info else RandomState().state_dict()
    torch_worker._worker_info = None  # noqa: SLF001 - as above
    try:
        yield
    finally:
        torch_worker._worker_info = info  # noqa: SLF001 - as above
        if random_state is not None:
            RandomState().load_state_dict(random_state)


def _has_state(holder: Any) -> bool:
    """Return whether a dataset or an iterator can restore its position to the sample."""
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
    """Batch layout of a stream; ``samples`` is 0, because the length is unknown until the end.

    Attributes:
        rounds: Rounds of the whole run. ``fraction`` divides by this number, as Transformers does.
        accumulation: Micro-batches per step and rank.
        ahead: Prefetched micro-batches of the pass.
    """

    rounds: int = 1
    accumulation: int = 1
    ahead: MicroBatchPrefetch | None = None

    def rounds_after(self, taken: int) -> int:
        """Return the number of rounds known to exist for the next step; 0 at the end."""
        if self.ahead is None or self.ahead.place != taken:
            return 1  # not prefetched yet
        return self.ahead.fill(self.accumulation)

    def fraction(self, taken: int) -> float:
        """Return ``taken`` samples of a pass as a share of the whole run."""
        return taken / self.round_samples / self.rounds


@dataclass(slots=True)
class StreamCursor(DataCursor):
    """Position of the whole job in a stream.

    Attributes:
        state: State of the dataset at this position, or None.
    """

    state: Any = None

    def advance(self, layout: Any) -> None:
        """Count one round as trained on."""
        sample_count, self.state = layout.ahead.trained()
        self.samples += sample_count

    def next_epoch(self) -> None:
        """Move to the start of the next pass."""
        DataCursor.next_epoch(self)
        self.state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on every rank."""
        return {**DataCursor.state_dict(self), "stream": {"state": self.state}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a position.

        Raises:
            IncompatibleCheckpoint: The position is in a dataset with a length.
        """
        if "stream" not in state_dict:
            raise IncompatibleCheckpoint(
                "the checkpoint is at a position of a dataset with a length, but this dataset is "
                "a stream",
                hint="train on the same data, or start a new run in another `output_dir`",
            )
        DataCursor.load_state_dict(self, state_dict)
        self.state = state_dict["stream"]["state"]


class MicroBatchPrefetch:
    """Prefetched micro-batches of a step, whose number is unknown before.

    Args:
        rounds: Collated rounds of this rank: (batch, samples of all ranks, state).
        place: Number of the pass's samples trained on so far, which this object updates.
        subject: Name of the dataset, for messages.
    """

    def __init__(self, rounds: Iterator[tuple[Any, int, Any]], place: int, subject: str) -> None:
        self.place = place
        self._rounds = rounds
        self._source_name = subject
        self._batches: deque[tuple[Any, int, Any]] = deque()
        self._handed_out: deque[tuple[int, Any]] = deque()

    def fill(self, batch_count: int) -> int:
        """Fetch up to ``batch_count`` micro-batches and return their number."""
        self._batches.extend(islice(self._rounds, max(0, batch_count - len(self._batches))))
        return len(self._batches)

    def require_any(self) -> None:
        """Refuse a stream without training data.

        Raises:
            ConfigError: The stream ended at once.
        """
        if not self.fill(1):
            raise ConfigError(
                f"train_dataset `{self._source_name}` is empty, or holds less than one round with "
                "`dataloader_drop_last`"
            )

    def trained(self) -> tuple[int, Any]:
        """Return (samples, state) of the oldest yielded micro-batch that is not yet counted."""
        sample_count, state = self._handed_out.popleft()
        self.place += sample_count
        return sample_count, state

    def __iter__(self) -> MicroBatchPrefetch:
        return self

    def __next__(self) -> Any:
        if not self.fill(1):
            raise StopIteration
        batch, sample_count, state = self._batches.popleft()
        self._handed_out.append((sample_count, state))
        return batch


class _CollateRound:
    """Collator of a round's samples, which leaves the position of the round unchanged."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, stream_round: StreamRound) -> tuple[Any, int, Any]:
        return self._collate(stream_round.samples), stream_round.taken, stream_round.state


class StreamLoader:
    """Loader of a stream; each iterator begins at the cursor.

    Args:
        loader: Yields collated rounds.
        reader: Dataset behind the loader.
        cursor: Position in the stream.
        layout: Batch layout; it receives the number of prefetched micro-batches.
        subject: Name of the dataset, for messages.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        reader: StreamReader,
        cursor: StreamCursor,
        layout: StreamBatchLayout,
        subject: str,
    ) -> None:
        self.loader = loader
        self._reader = reader
        self._cursor = cursor
        self._layout = layout
        self._source_name = subject
        self._rounds: Iterator[Any] | None = None

    def close(self) -> None:
        """Stop reading: drop prefetched batches, end the processes and close the reader."""
        self._layout.ahead = None
        end_workers(self._rounds)
        self._reader.close()

    def __iter__(self) -> MicroBatchPrefetch:
        end_workers(self._rounds)
        self._rounds = iter(self.loader)
        prefetch = MicroBatchPrefetch(self._rounds, self._cursor.samples, self._source_name)
        if not self._cursor.samples:
            prefetch.require_any()
        self._layout.ahead = prefetch
        return prefetch


def place_in_stream(
    args: TrainingArguments, world: World
) -> tuple[StreamCursor, StreamBatchLayout]:
    """Return the start and the batch layout of a stream.

    Raises:
        ConfigError: The arguments need a dataset with a length.
    """
    if args.max_steps <= 0:
        raise ConfigError(
            "the train_dataset is a stream, so the length of an epoch is unknown: set `max_steps`"
        )
    if args.train_sampling_strategy in ("group_by_length", "batch_rebalance"):
        raise ConfigError(
            f"`train_sampling_strategy`={args.train_sampling_strategy!r} needs a train_dataset "
            "with a length: a stream is trained in its own order"
        )
    unknown = (("auto_find_batch_size", False), ("random_numbers", "own"), ("reduction", "native"))
    for name, default in unknown:
        if getattr(args, name) not in (default, None):
            raise ConfigError(
                f"`{name}`={getattr(args, name)!r} needs a train_dataset with a length, and this "
                "is a stream: omit it"
            )
    accumulation = args.gradient_accumulation_steps
    layout = StreamBatchLayout(
        samples=0,
        batch=args.per_device_train_batch_size,
        ranks=world.size,
        drop_last=args.dataloader_drop_last,
        rounds=args.max_steps * accumulation,
        accumulation=accumulation,
    )
    return StreamCursor(0, args.order_seed), layout


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
    layout: Any = sampler.layout
    reader = StreamReader(dataset, cursor, layout, sampler.rank)
    options = stream_options(args, pin=pin)
    loader = DataLoader(
        reader, batch_size=None, collate_fn=cast("Any", _CollateRound(collate)), **options
    )
    return StreamLoader(loader, reader, cursor, layout, type(dataset).__name__)


def stream_options(args: TrainingArguments, *, pin: bool) -> dict[str, Any]:
    """Return DataLoader's arguments; its processes end with a pass and restart in the next.

    The generator keeps torch from drawing from the global stream.
    """
    options = worker_options(args, pin=pin)
    generator = torch.Generator().manual_seed(args.order_seed)
    return {**options, "persistent_workers": False, "generator": generator}
