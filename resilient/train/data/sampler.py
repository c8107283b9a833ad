"""Resumable sampler, the whole job's position in the data, and the train loader.

The order of an epoch is a function of (seed, epoch). The order is cut into rounds. A round has one
micro-batch for each rank. The micro-batches of ranks 0, 1, 2, ... are consecutive in the order. The
position is the number of samples of the epoch that the whole job has trained on. The position
advances when a round was trained on, not when a loader prefetched the round. A resume therefore
neither repeats nor skips samples, and works at another batch size or number of ranks. A resume
takes the same time at every position, because it does not read the samples before the position.

A cluster scheduler or a terminal often sends a stop signal to all processes of a job. The current
step still needs its samples, so the loader's processes ignore the signal until the trainer ends
them.

The position of an imported Transformers run is computed from its fractional epoch, its batch size
and its number of ranks. Transformers does not record the number of batches per epoch. This number
is computed from the size of the training set.
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
# Shared with forked children. A handler cannot see the sender of a signal. The trainer
# marks here that it exits: the next SIGTERM is then from the trainer and must take effect.
_is_leaving = mmap.mmap(-1, 1)


def claim_workers() -> None:
    """Register this process as the trainer of the DataLoader workers that it starts.

    A pre-imported worker of the agent is forked after this module's import. The importing process
    is then not the trainer, and all ranks would share one exit mark.
    """
    global _trainer_pid, _is_leaving
    if os.getpid() != _trainer_pid:
        _trainer_pid, _is_leaving = os.getpid(), mmap.mmap(-1, 1)


def ignore_stop_signals(_worker: int) -> None:
    """Ignore interrupts, and the first SIGTERM unless the trainer is exiting.

    Processes not forked from the trainer cannot see the exit mark, so they obey SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() == _trainer_pid:
        signal.signal(signal.SIGTERM, _ignore_first)


def _ignore_first(number: int, _frame: Any) -> None:
    _end_with_the_trainer()
    signal.signal(number, _obey)


def _obey(number: int, _frame: Any) -> None:
    _end_with_the_trainer()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_with_the_trainer() -> None:
    """Exit with code 0 if the trainer is exiting.

    torch checks its loaders whenever a child of the trainer ends. If a signal killed the child,
    torch would raise an error during the interpreter's shutdown.
    """
    if _is_leaving[0]:
        os._exit(os.EX_OK)


@atexit.register
def _leave() -> None:
    if os.getpid() == _trainer_pid:
        _is_leaving[0] = 1


_CLOSE = 1e-6


def place_in_epoch(origin: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Return the epoch, and how many of its samples were trained on.

    Args:
        origin: ``epoch`` with its fraction, ``batch`` (samples per rank and micro-batch) and
            ``ranks`` of the run that saved.
        size: Number of samples in the training set.

    Raises:
        ValueError: The fraction of the epoch is not a whole number of batches of this training set.
    """
    number, share = divmod(float(origin["epoch"]), 1.0)
    if share > 1 - _CLOSE:
        number, share = number + 1, 0.0
    if share < _CLOSE:
        return int(number), 0
    samples_per_step = int(origin["batch"]) * int(origin["ranks"])
    if samples_per_step < 1:
        raise ValueError("it does not state how many samples a batch had")
    # With `dataloader_drop_last` the last, incomplete batch is left out.
    for batches in (math.ceil(size / samples_per_step), size // samples_per_step):
        batches_done = share * batches
        if batches and abs(batches_done - round(batches_done)) < _CLOSE * batches:
            return int(number), min(round(batches_done) * samples_per_step, size)
    raise ValueError(
        f"epoch {origin['epoch']} is not a whole number of batches of {samples_per_step} samples "
        f"in a training set of {size}: it was trained on another set, or with another batch size"
    )


@dataclass(slots=True)
class BatchLayout:
    """Division of an epoch into rounds and micro-batches of ranks.

    Attributes:
        samples: Size of the dataset.
        batch: Samples per micro-batch and rank.
        ranks: Micro-batches per round.
        drop_last: Leave out an incomplete last round instead of filling it up.
    """

    samples: int
    batch: int
    ranks: int
    drop_last: bool = False

    @property
    def round_samples(self) -> int:
        """Samples of one round over all ranks."""
        return self.batch * self.ranks

    def rounds_after(self, taken: int) -> int:
        """Return the rounds left in an epoch of which ``taken`` samples are consumed."""
        samples_left = self.samples - taken
        if samples_left <= 0:
            return 0
        full_rounds, remainder = divmod(samples_left, self.batch * self.ranks)
        return full_rounds + (1 if remainder and not self.drop_last else 0)

    def fraction(self, taken: int) -> float:
        """Return the finished share of an epoch's rounds after ``taken`` samples."""
        rounds = self.rounds_after(0)
        return (rounds - self.rounds_after(taken)) / rounds

    def micro_batch(self, order: torch.Tensor, start: int, rank: int) -> list[int]:
        """Return the indices of ``rank`` in the round that begins at position ``start``.

        An incomplete last round is filled up from the start of the order, so that all ranks have
        equal batches. A single rank takes the remaining samples. Both rules are those of
        accelerate.
        """
        low = start + rank * self.batch
        if self.ranks == 1:
            return _indices(order[low : low + self.batch])
        if low + self.batch <= self.samples:
            return _indices(order[low : low + self.batch])
        return _indices(order[torch.arange(low, low + self.batch) % self.samples])


def _indices(part: torch.Tensor) -> list[int]:
    indices: list[int] = part.tolist()
    return indices


@dataclass(slots=True)
class DataCursor:
    """Position of the whole job in the data; a part of every checkpoint.

    Attributes:
        size: Number of samples in the dataset.
        seed: Seed of the order. The seed in a checkpoint overrides a new argument.
        epoch: Current epoch.
        samples: Number of samples of the epoch's order that have been trained on.
        is_open: Whether the epoch has begun and its end was not yet handled.
        origin: Facts about the run of another trainer whose random draws are repeated; None
            if no other trainer began the run.
        group: Samples of a step for grouping by length; the value of the first attempt is kept.
        skipped: Skipped ranges: (epoch, samples) of start and end.
        streams: Random streams at the start of the run, if each epoch's order is drawn from
            them as in another trainer.
        drawn: Stream state from which this epoch's order was drawn, if ``streams`` is used.
        planned: Planned length of the run, with the inputs of the plan; see
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
        """Move to a later position, in this epoch or another, and record the skipped range."""
        self.skipped = [*self.skipped, [self.epoch, self.samples, epoch, samples]]
        self.epoch, self.samples, self.is_open = epoch, samples, True
        self.drawn = drawn

    def advance(self, layout: BatchLayout) -> None:
        """Count one round as trained on."""
        self.samples = min(self.samples + layout.round_samples, self.size)

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
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
        """Restore a position.

        Raises:
            IncompatibleCheckpoint: The position is in a dataset of another size, or in an unknown
                order.
            ValueError: The position is from another trainer and does not fit this dataset.
        """
        if "elsewhere" in state_dict:
            self._adopt_position(state_dict["elsewhere"])
            return
        if state_dict["size"] != self.size:
            raise IncompatibleCheckpoint(
                f"the checkpoint is at sample {state_dict['samples']} of a training set of "
                f"{state_dict['size']} samples, but this set has {self.size}: the order of its "
                "samples differs",
                hint="train on the same data, or start a new run in another `output_dir`",
            )
        self.seed = state_dict["seed"]
        self.epoch = state_dict["epoch"]
        self.samples = state_dict["samples"]
        self.is_open = state_dict["is_open"]
        self.origin = state_dict.get("origin")
        self.group = state_dict.get("group", self.group)
        self.skipped = [list(span) for span in state_dict.get("skipped", [])]
        self.drawn = state_dict.get("drawn", "")
        self.planned = state_dict.get("planned")

    def _adopt_position(self, place: Mapping[str, Any]) -> None:
        """Take a position from another trainer."""
        self.epoch, self.samples = place_in_epoch(place, self.size)
        self.is_open = self.samples > 0
        self.planned = None
        if self.is_open and self.streams is not None:
            self.drawn = find_drawn(place, self.streams, self.size)
        # After the first load the state of the stream is not needed.
        self.origin = {
            name: value for name, value in place.items() if name not in ("stream", "evaluated")
        }


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Indices of one rank in one round, and the key of their random stream.

    ``key`` is (seed, epoch, position of the first sample in the epoch's order).
    """

    indices: list[int]
    key: tuple[int, int, int]


class ResumableSampler(Sampler[Any]):
    """Sampler of this rank's micro-batches from the cursor to the end of the epoch.

    The sampler runs ahead of training as far as the loader prefetches, and does not move the
    cursor.

    Attributes:
        on_order: Called with cursor, kind and indices for each order that is begun or continued.
    """

    on_order: Callable[[DataCursor, str, torch.Tensor], None] | None = None

    def __init__(
        self, cursor: DataCursor, layout: BatchLayout, rank: int, sampling: Sampling | None = None
    ) -> None:
        self.cursor = cursor
        self.layout = layout
        self.rank = rank
        self.sampling = sampling or Sampling()

    def __iter__(self) -> Iterator[MicroBatch]:
        cursor, layout = self.cursor, self.layout
        epoch, seed, start = cursor.epoch, cursor.seed, cursor.samples
        batches = self.sampling.batches(self.begin_order(), cursor, layout, self.rank)
        for turn, indices in enumerate(batches):
            place = start + turn * layout.round_samples + self.rank * layout.batch
            yield MicroBatch(indices, (seed, epoch, place))

    def __len__(self) -> int:
        return self.layout.rounds_after(self.cursor.samples)

    def begin_order(self) -> torch.Tensor:
        """Return the order of the cursor's epoch, and call ``on_order``."""
        order = self.sampling.order(self.cursor)
        if self.on_order is not None:
            self.on_order(self.cursor, self.sampling.name, order)
        return order


class KeyedDataset(Dataset[Any]):
    """Dataset that fetches micro-batches; in a worker, each has its own random stream.

    Random augmentation therefore depends on the sample's position in the run, not on the worker or
    on earlier batches of the worker.

    Args:
        dataset: Map-style dataset.
        always: Whether to seed in this process too. Each batch then resets the random stream of the
            process.
    """

    def __init__(self, dataset: Any, *, always: bool = False) -> None:
        self.dataset = dataset
        self._always = always
        self._fetch_batch = getattr(dataset, "__getitems__", None)

    def __getitems__(self, batch: MicroBatch) -> Any:
        """Return the samples of ``batch``."""
        if self._always or get_worker_info() is not None:
            seed_worker(batch.key)
        if self._fetch_batch is not None:
            return self._fetch_batch(batch.indices)
        dataset = self.dataset
        return [dataset[index] for index in batch.indices]


def seed_worker(key: Sequence[int]) -> None:
    """Seed this process's random numbers of Python, NumPy and torch from ``key``."""
    words = np.random.SeedSequence([word % 2**64 for word in key]).generate_state(4)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002 - the global stream is what datasets use
    torch.manual_seed((int(words[2]) << 32) | int(words[3]))


def seed_between_steps(seed: int, step: int, leaves: int) -> None:
    """Seed the draws after the passes of a step (counted from 0) of ``leaves`` micro-batches.

    For canonical reduction; the same on every rank.
    """
    seed_worker((seed, step, leaves + 1))


def require_map_style(dataset: Any, role: str) -> int:
    """Return the size of a map-style dataset.

    Raises:
        ConfigError: The dataset is missing, a stream, or empty.
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
    """Return the layout of a training set of ``samples`` for ``world``.

    Raises:
        ConfigError: Dropping the last round leaves no samples.
    """
    layout = BatchLayout(
        samples=samples,
        batch=args.per_device_train_batch_size,
        ranks=world.size,
        drop_last=args.dataloader_drop_last,
    )
    if not layout.rounds_after(0):
        raise ConfigError(
            f"`dataloader_drop_last` leaves nothing to train on: {samples} samples are fewer "
            f"than one round of {layout.round_samples}"
        )
    return layout


def train_loader(
    args: TrainingArguments,
    dataset: Any,
    sampler: ResumableSampler,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
) -> DataLoader[Any]:
    """Return a loader whose every iterator begins at the sampler's cursor.

    The loader has its own generator. Without it, each iterator would draw one number from torch's
    global stream, so dropout would depend on the number of iterators.
    """
    return DataLoader(
        KeyedDataset(dataset, always=is_canonical(args)),
        batch_sampler=sampler,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(sampler.cursor.seed),
        **worker_options(args, pin=pin),
    )


def worker_options(args: TrainingArguments, *, pin: bool) -> dict[str, Any]:
    """Return DataLoader's arguments for processes and memory."""
    options: dict[str, Any] = {
        "num_workers": args.dataloader_num_workers,
        "pin_memory": pin and args.dataloader_pin_memory,
    }
    if args.dataloader_num_workers:
        claim_workers()
        options["persistent_workers"] = args.dataloader_persistent_workers
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["worker_init_fn"] = ignore_stop_signals
        options["multiprocessing_context"] = args.dataloader_multiprocessing_context
    return options
