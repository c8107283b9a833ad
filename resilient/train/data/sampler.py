"""ResumableSampler, DataCursor, dataloader.

What a data loader's process makes of signals: a stop that is asked of everyone is not its own.

A scheduler or a terminal often signals all processes of a job. The step that is under way still
needs its samples, so the loader's processes stay until the trainer ends them.

Where in the data a run of Transformers is, counted in samples (pure).

Its state counts steps and says the epoch with its fraction. How many batches an epoch had is not
recorded; it follows from the size of the training set.

The order of samples, and one position in it for the whole job.

The order of an epoch is a function of (seed, epoch). It is cut into rounds: one micro-batch for
each rank, consecutive in the order, dealt to ranks 0, 1, 2, ... in turn. The position is the
number of samples of the epoch that the whole job has trained on. It moves when a round was
trained on, not when a loader prefetched it, so going on from a checkpoint repeats nothing, skips
nothing, costs the same at every step, and works at another batch size or number of ranks.
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import random
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from resilient.errors import ConfigError, IncompatibleCheckpoint
from resilient.train.arguments.derived import is_canonical
from resilient.train.data.ordering import Sampling, find_drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.distributed.launch_env import World
    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.ordering import HFRandomStreams

_trainer_pid = os.getpid()
# Shared with what we fork. A handler cannot see who sent a signal, so the trainer says here
# that it is leaving: then the SIGTERM is its own, sent once, and it waits for it to work.
_is_leaving = mmap.mmap(-1, 1)


def claim_workers() -> None:
    """Make the DataLoader workers that this process starts its own.

    A warm worker of the agent was forked after this module was imported: the process that
    imported it is not the trainer, and the mark of leaving would be shared by all ranks.
    """
    global _trainer_pid, _is_leaving
    if os.getpid() != _trainer_pid:
        _trainer_pid, _is_leaving = os.getpid(), mmap.mmap(-1, 1)


def outlive_a_request(_worker: int) -> None:
    """Ignore interrupts, and the first SIGTERM unless the trainer is leaving.

    Processes that were not forked from the trainer cannot see that, so they obey SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() == _trainer_pid:
        signal.signal(signal.SIGTERM, _outlive)


def _outlive(number: int, _frame: Any) -> None:
    _end_with_the_trainer()
    signal.signal(number, _obey)


def _obey(number: int, _frame: Any) -> None:
    _end_with_the_trainer()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_with_the_trainer() -> None:
    """End in good order if the trainer is leaving.

    To die of the signal would be an error to torch, which looks at its loaders whenever a child
    of the trainer ends and raises there, in the middle of the interpreter's end.
    """
    if _is_leaving[0]:
        os._exit(os.EX_OK)


@atexit.register
def _leave() -> None:
    if os.getpid() == _trainer_pid:
        _is_leaving[0] = 1


_CLOSE = 1e-6


def place_in_epoch(origin: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Return the epoch, and the samples of it that were trained on.

    Args:
        origin: ``epoch`` with its fraction, ``batch`` (samples per rank and micro-batch) and
            ``ranks`` of the run that saved.
        size: samples in the training set.

    Raises:
        ValueError: no number of whole batches is that fraction of an epoch of this set.
    """
    number, share = divmod(float(origin["epoch"]), 1.0)
    if share > 1 - _CLOSE:
        number, share = number + 1, 0.0
    if share < _CLOSE:
        return int(number), 0
    each = int(origin["batch"]) * int(origin["ranks"])
    if each < 1:
        raise ValueError("it does not say how many samples a batch had")
    # With `dataloader_drop_last` the last, incomplete one is left out.
    for batches in (math.ceil(size / each), size // each):
        done = share * batches
        if batches and abs(done - round(done)) < _CLOSE * batches:
            return int(number), min(round(done) * each, size)
    raise ValueError(
        f"epoch {origin['epoch']} is no whole number of batches of {each} samples in a training "
        f"set of {size}: it was trained on another one, or with another batch size"
    )


@dataclass(slots=True)
class BatchLayout:
    """How an epoch is cut and dealt.

    Attributes:
        samples: size of the dataset.
        batch: samples per micro-batch and rank.
        ranks: micro-batches per round.
        drop_last: leave out an incomplete last round instead of completing it.
    """

    samples: int
    batch: int
    ranks: int
    drop_last: bool = False

    @property
    def round_samples(self) -> int:
        """Samples that all ranks together take in one round."""
        return self.batch * self.ranks

    def rounds_after(self, taken: int) -> int:
        """Return how many rounds are left of an epoch when ``taken`` samples are consumed."""
        left = self.samples - taken
        if left <= 0:
            return 0
        whole, rest = divmod(left, self.batch * self.ranks)
        return whole + (1 if rest and not self.drop_last else 0)

    def fraction(self, taken: int) -> float:
        """Return how much of an epoch's rounds is done when ``taken`` samples are consumed."""
        rounds = self.rounds_after(0)
        return (rounds - self.rounds_after(taken)) / rounds

    def micro_batch(self, order: torch.Tensor, start: int, rank: int) -> list[int]:
        """Return the indices of ``rank`` in the round that begins at position ``start``.

        An incomplete last round is completed from the start of the order, so that all ranks
        have equal batches; a single rank takes what is left (both as in accelerate).
        """
        low = start + rank * self.batch
        if self.ranks == 1:
            return _indices(order[low : low + self.batch])
        if low + self.batch <= self.samples:
            return _indices(order[low : low + self.batch])
        return _indices(order[torch.arange(low, low + self.batch) % self.samples])


def _indices(part: torch.Tensor) -> list[int]:
    listed: list[int] = part.tolist()
    return listed


@dataclass(slots=True)
class DataCursor:
    """Where the whole job is in the data; a part of every checkpoint.

    Attributes:
        size: samples in the dataset.
        seed: what the order is drawn from; a checkpoint's own wins over a new argument.
        epoch: the current epoch.
        samples: how many samples of the epoch's order have been trained on.
        is_open: whether the epoch has begun and its end was not yet handled.
        origin: whose random numbers are drawn, if they are another trainer's; with what is known
            of the run that it began.
        group: samples of a step, as grouping by length counts them; the first life's stay.
        skipped: stretches that were left out: (epoch, samples) of begin and end.
        streams: where the run's random numbers began, if it draws as another trainer and that
            draws the order of each epoch from them.
        drawn: what the order of this epoch was drawn from, then.
        planned: the planned length of the run, with what the plan follows from; see
            :mod:`resilient.train.step_count`.
    """

    size: int
    seed: int
    epoch: int = 0
    samples: int = 0
    is_open: bool = False
    origin: Mapping[str, Any] | None = None
    group: int = 1
    skipped: list[list[int]] = field(default_factory=list)
    streams: HFRandomStreams | None = None
    drawn: str = ""
    planned: Mapping[str, Any] | None = None

    def skip_to(self, epoch: int, samples: int, drawn: str = "") -> None:
        """Go to a later place, in this epoch or another, and remember what is left out."""
        self.skipped = [*self.skipped, [self.epoch, self.samples, epoch, samples]]
        self.epoch, self.samples, self.is_open = epoch, samples, True
        self.drawn = drawn

    def advance(self, deal: BatchLayout) -> None:
        """Count one round as trained on."""
        self.samples = min(self.samples + deal.round_samples, self.size)

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.samples = 0
        self.drawn = ""

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on every rank."""
        return {
            "size": self.size,
            "seed": self.seed,
            "epoch": self.epoch,
            "samples": self.samples,
            "is_open": self.is_open,
            **({"origin": self.origin} if self.origin else {}),
            "group": self.group,
            **({"skipped": self.skipped} if self.skipped else {}),
            **({"drawn": self.drawn} if self.drawn else {}),
            **({"planned": dict(self.planned)} if self.planned else {}),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back a position.

        Raises:
            IncompatibleCheckpoint: it is a position in a dataset of another size, or in an order
                that nobody knows.
            ValueError: it is another trainer's, which makes no sense in this dataset.
        """
        if "elsewhere" in state_dict:
            self._go_to(state_dict["elsewhere"])
            return
        if state_dict["size"] != self.size:
            raise IncompatibleCheckpoint(
                f"the checkpoint is at sample {state_dict['samples']} of a training set of "
                f"{state_dict['size']} samples, and this one has {self.size}: "
                "the order of its samples is another one",
                hint="train on the same data, or start a new run in another `output_dir`",
            )
        self.seed = state_dict["seed"]
        self.epoch = state_dict["epoch"]
        self.samples = state_dict["samples"]
        self.is_open = state_dict["is_open"]
        self.origin = state_dict.get("origin")
        self.group = state_dict.get("group", self.group)
        self.skipped = [list(one) for one in state_dict.get("skipped", [])]
        self.drawn = state_dict.get("drawn", "")
        self.planned = state_dict.get("planned")

    def _go_to(self, place: Mapping[str, Any]) -> None:
        """Take over a position of another trainer."""
        self.epoch, self.samples = place_in_epoch(place, self.size)
        self.is_open = self.samples > 0
        self.planned = None
        if self.is_open and self.streams is not None:
            self.drawn = find_drawn(place, self.streams, self.size)
        # What the stream was is of no use from here on.
        self.origin = {
            name: one for name, one in place.items() if name not in ("stream", "evaluated")
        }


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One rank's indices of one round, and the name of its random stream.

    ``key`` is (seed, epoch, position of the first sample in the epoch's order).
    """

    indices: list[int]
    key: tuple[int, int, int]


class ResumableSampler(Sampler[Any]):
    """Yields this rank's micro-batches from the cursor to the end of its epoch.

    It runs ahead of training as far as the loader prefetches, and leaves the cursor alone.

    Attributes:
        on_order: told of each order that is begun or gone on with: cursor, kind, indices.
    """

    on_order: Callable[[DataCursor, str, torch.Tensor], None] | None = None

    def __init__(
        self, cursor: DataCursor, deal: BatchLayout, rank: int, sampling: Sampling | None = None
    ) -> None:
        self.cursor = cursor
        self.deal = deal
        self.rank = rank
        self.sampling = sampling or Sampling()

    def __iter__(self) -> Iterator[MicroBatch]:
        cursor, deal = self.cursor, self.deal
        epoch, seed, start = cursor.epoch, cursor.seed, cursor.samples
        batches = self.sampling.batches(self.begin_order(), cursor, deal, self.rank)
        for turn, indices in enumerate(batches):
            place = start + turn * deal.round_samples + self.rank * deal.batch
            yield MicroBatch(indices, (seed, epoch, place))

    def __len__(self) -> int:
        return self.deal.rounds_after(self.cursor.samples)

    def begin_order(self) -> torch.Tensor:
        """Return the order of the cursor's epoch, and tell of it."""
        order = self.sampling.order(self.cursor)
        if self.on_order is not None:
            self.on_order(self.cursor, self.sampling.name, order)
        return order


class KeyedDataset(Dataset[Any]):
    """Fetches micro-batches; in a worker process each under its own random stream.

    So random augmentation depends on the sample's place in the run, not on which worker drew it
    or how many batches that worker made before.

    Args:
        dataset: map-style.
        always: in this process too, whose stream each batch then begins anew.
    """

    def __init__(self, dataset: Any, *, always: bool = False) -> None:
        self.dataset = dataset
        self._always = always
        self._fetch_many = getattr(dataset, "__getitems__", None)

    def __getitems__(self, batch: MicroBatch) -> Any:
        """Return the samples of ``batch``."""
        if self._always or get_worker_info() is not None:
            seed_worker(batch.key)
        if self._fetch_many is not None:
            return self._fetch_many(batch.indices)
        dataset = self.dataset
        return [dataset[index] for index in batch.indices]


def seed_worker(key: Sequence[int]) -> None:
    """Seed Python's, NumPy's and torch's random numbers of this process from ``key``."""
    words = np.random.SeedSequence([word % 2**64 for word in key]).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - the global stream is what datasets use
    torch.manual_seed((int(words[2]) << 32) | int(words[3]))


def seed_between_steps(seed: int, step: int, leaves: int) -> None:
    """Seed what is drawn after the passes of a step (counted from 0) of ``leaves`` micro-batches.

    With canonical reduction; the same on every rank.
    """
    seed_worker((seed, step, leaves + 1))


def require_map_style(dataset: Any, role: str) -> int:
    """Return the size of a map-style dataset.

    Raises:
        ConfigError: it is missing, a stream, or empty.
    """
    if dataset is None:
        raise ConfigError(f"the trainer has no {role}")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{role} `{type(dataset).__name__}` has no length: give a dataset with __len__ and "
            "__getitem__"
        )
    if len(dataset) == 0:
        raise ConfigError(f"{role} `{type(dataset).__name__}` is empty")
    return len(dataset)


def make_batch_layout(args: TrainingArguments, world: World, samples: int) -> BatchLayout:
    """Return how ``args`` cut a training set of ``samples`` for ``world``.

    Raises:
        ConfigError: dropping the last round leaves nothing.
    """
    deal = BatchLayout(
        samples=samples,
        batch=args.per_device_train_batch_size,
        ranks=world.size,
        drop_last=args.dataloader_drop_last,
    )
    if not deal.rounds_after(0):
        raise ConfigError(
            f"`dataloader_drop_last` leaves nothing to train on: {samples} samples are fewer "
            f"than one round of {deal.round_samples}"
        )
    return deal


def train_loader(
    args: TrainingArguments,
    dataset: Any,
    sampler: ResumableSampler,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
) -> DataLoader[Any]:
    """Return a loader whose every iterator begins at the sampler's cursor.

    It has a generator of its own: the default is to draw one number per iterator from torch's
    global stream, and that would tie dropout to the number of loaders made.
    """
    return DataLoader(
        KeyedDataset(dataset, always=is_canonical(args)),
        batch_sampler=sampler,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(sampler.cursor.seed),
        **worker_options(args, pin=pin),
    )


def worker_options(args: TrainingArguments, *, pin: bool) -> dict[str, Any]:
    """Return the arguments of DataLoader about processes and memory."""
    options: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": pin and args.dataloader_pin_memory,
    }
    if args.dataloader_num_workers:
        claim_workers()
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["worker_init_fn"] = outlive_a_request
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
    return options
