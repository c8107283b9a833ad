"""Datasets without a length: read whole by everyone, dealt by count, resumed at any sample.

The order is the stream's own. It is cut into rounds like a dataset with a length: one micro-batch
for each rank, consecutive in the stream. Every rank, and every process that loads for it, reads
the whole stream and keeps what is its own; so what is trained on depends neither on their number
nor on which of them was quick. The position is the number of samples of the pass that all ranks
have trained on, and the dataset's own state there if it has one that can be trusted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.train.data.sampling import Cursor, Deal, ResumableSampler, worker_options
from resilient.train.data.stream_reading import Round, StreamReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from resilient.train.arguments import TrainingArguments
    from resilient.world.world import World


@dataclass(slots=True)
class StreamDeal(Deal):
    """How a stream is cut; ``samples`` is 0, and its end is known when it comes.

    Attributes:
        rounds: of the whole run, which a fraction of a pass is told in, as Transformers does.
        accumulation: micro-batches per step and rank.
        ahead: what was fetched of the pass.
    """

    rounds: int = 1
    accumulation: int = 1
    ahead: Ahead | None = None

    def rounds_after(self, taken: int) -> int:
        """Return the rounds that are sure to come, up to one step of them; 0 at the end."""
        if self.ahead is None or self.ahead.place != taken:
            return 1  # nobody has looked yet
        return self.ahead.fill(self.accumulation)

    def fraction(self, taken: int) -> float:
        """Return how much of the run ``taken`` samples of a pass are."""
        return taken / self.round_samples / self.rounds


@dataclass(slots=True)
class StreamCursor(Cursor):
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
        Cursor.next_epoch(self)
        self.state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on every rank."""
        return {**Cursor.state_dict(self), "stream": {"state": self.state}}

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
        Cursor.load_state_dict(self, state_dict)
        self.state = state_dict["stream"]["state"]


class Ahead:
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

    def __iter__(self) -> Ahead:
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

    def __call__(self, one: Round) -> tuple[Any, int, Any]:
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
        deal: StreamDeal,
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

    def __iter__(self) -> Ahead:
        ahead = Ahead(iter(self.loader), self._cursor.samples, self._what)
        if not self._cursor.samples:
            ahead.require_any()
        self._deal.ahead = ahead
        return ahead


def place_in_stream(args: TrainingArguments, world: World) -> tuple[StreamCursor, StreamDeal]:
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
    deal = StreamDeal(
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
