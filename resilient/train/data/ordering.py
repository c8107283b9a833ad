"""Sample order of an epoch by ``train_sampling_strategy``, and replay of Transformers' draws.

An order is a function of the seed, the epoch and the dataset. The order is therefore the same on
every rank and in every attempt, and a checkpoint needs only a position in the order.

The loaders of this package do not use torch's global random stream. An evaluation therefore does
not change the random numbers of later training. Transformers draws one number from this stream for
each loader. With length grouping, Transformers also draws the order of the epoch from the stream.
Such an order depends on all earlier draws. The data position of a run that Transformers began
therefore contains the state of the stream.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from resilient.errors import ConfigError, IncompatibleCheckpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.sampler import BatchLayout, DataCursor


@dataclass(frozen=True, slots=True)
class HFRandomStreams:
    """State of torch's global stream when a Transformers run began to group by length.

    Attributes:
        seed: Seed of the stream.
        is_known: Whether all later draws can be repeated (not after ``model_init``).
    """

    seed: int
    is_known: bool = True


def draw_for_loader(cursor: DataCursor) -> None:
    """Draw the number of a new loader iterator, in a run that Transformers began."""
    if cursor.origin:
        _draw_number(None)


def draw_for_epoch(cursor: DataCursor) -> None:
    """Draw the numbers that Transformers draws at the start of an epoch.

    Collective if an order is drawn.

    In Transformers, ranks with different streams would diverge; here all use rank 0's order.
    """
    draw_for_loader(cursor)
    if not cursor.origin or cursor.streams is None:
        return
    shared = [packed(torch.get_rng_state())]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    cursor.drawn = shared[0]
    torch.randperm(cursor.size)


def drawn_order(cursor: DataCursor) -> torch.Tensor:
    """Return the drawn random order of an epoch: int64 indices, shape (samples,)."""
    generator = torch.Generator()
    state = torch.frombuffer(bytearray(base64.b64decode(cursor.drawn)), dtype=torch.uint8)
    generator.set_state(state)
    return torch.randperm(cursor.size, generator=generator)


def packed(state: torch.Tensor) -> str:
    """Return a generator's state (uint8) as text."""
    return base64.b64encode(state.numpy().tobytes()).decode()


def seen_of(random: Mapping[str, Any] | None, history: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts about the random stream that :func:`find_drawn` needs.

    Args:
        random: Random state of rank 0, if it was saved.
        history: Log history; each evaluation draws a number. An entry without an epoch is not of
            the training, and draws none.
    """
    evaluated = [
        math.ceil(entry["epoch"]) - 1
        for entry in history
        if "epoch" in entry and any(name.startswith("eval_") for name in entry)
    ]
    return {"stream": packed(random["cpu"]) if random else "", "evaluated": evaluated}


def find_drawn(origin: Mapping[str, Any], streams: HFRandomStreams, size: int) -> str:
    """Return the stream state from which the current epoch's order was drawn.

    All draws are repeated from the seed on. A difference from the saved state shows that a draw is
    missing. If there are further draws (dropout on a CPU), the function still finds the first
    epoch's order, which was drawn before them.

    Args:
        origin: Origin of the cursor, with the result of :func:`seen_of`.
        streams: Streams at the run's start.
        size: Number of samples in the training set.

    Raises:
        IncompatibleCheckpoint: The state cannot be determined.
    """
    epoch, evaluated = int(origin["epoch"]), list(origin.get("evaluated", ()))
    generator = torch.Generator().manual_seed(streams.seed)
    state_text = ""
    for number in range(-1, epoch + 1):
        if number >= 0:
            _draw_number(generator)
            state_text = packed(generator.get_state())
            torch.randperm(size, generator=generator)
        for _ in range(evaluated.count(number)):
            _draw_number(generator)
    is_proven = packed(generator.get_state()) == origin.get("stream")
    if is_proven or (epoch == 0 and streams.is_known):
        return state_text
    cause_text = "" if streams.is_known else ", and `model_init` drew from it before"
    raise IncompatibleCheckpoint(
        f"the checkpoint is in the middle of epoch {epoch} of samples grouped by length, and "
        "their order is unknown: Transformers draws it from torch's global stream, and does not "
        f"save the position of that stream{cause_text}; another order would skip samples and "
        "repeat others",
        hint="take a checkpoint from the end of an epoch or from the first epoch, with the seed of "
        "the run, or start a new run from the weights with `trainer.load_model(...)`",
    )


def _draw_number(generator: torch.Generator | None) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)


# Weight of attention's quadratic term in the cost of a micro-batch (Transformers' value).
_QUADRATIC = 0.001
_GROUPS_MAX = 50
_SAMPLES_AT_ONCE = 4096


def epoch_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the random order of an epoch: int64 indices, shape (samples,).

    ``torch.randperm`` under a generator seeded with ``seed + epoch``, like accelerate's seedable
    sampler, so the order equals that of a Transformers run.
    """
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True, slots=True)
class Sampling:
    """``random``: a new order for each epoch."""

    name: ClassVar[str] = "random"

    def order(self, cursor: DataCursor) -> torch.Tensor:
        """Return the order of the cursor's epoch: int64 indices, shape (samples,)."""
        return epoch_order(cursor.size, cursor.seed, cursor.epoch)

    def batches(
        self, order: torch.Tensor, cursor: DataCursor, layout: BatchLayout, rank: int
    ) -> Iterator[list[int]]:
        """Yield the indices of this rank's micro-batches from the cursor to the epoch's end."""
        start = cursor.samples
        batch_size = layout.round_samples
        rounds_at_once = max(_SAMPLES_AT_ONCE // batch_size, 1)
        full_rounds = max(layout.samples - start, 0) // batch_size
        for turn in range(0, full_rounds, rounds_at_once):
            low, count = start + turn * batch_size, min(rounds_at_once, full_rounds - turn)
            # Read the tensor once for many rounds, because reading takes longer than slicing a
            # list.
            indices: list[int] = order[low : low + count * batch_size].tolist()
            for first in range(rank * layout.batch, len(indices), batch_size):
                yield indices[first : first + layout.batch]
        for turn in range(full_rounds, layout.rounds_after(start)):
            yield layout.micro_batch(order, start + turn * batch_size, rank)


@dataclass(frozen=True, slots=True)
class Sequential(Sampling):
    """``sequential``: the dataset's own order."""

    name: ClassVar[str] = "sequential"

    def order(self, cursor: DataCursor) -> torch.Tensor:
        """Return all indices from 0 on."""
        return torch.arange(cursor.size)


@dataclass(frozen=True, slots=True)
class LengthGrouped(Sampling):
    """``group_by_length``: neighbours have similar lengths, the longest group comes first.

    Attributes:
        lengths: Length of each sample.
    """

    name: ClassVar[str] = "group_by_length"
    lengths: Sequence[int]

    def order(self, cursor: DataCursor) -> torch.Tensor:
        """Return the random order, sorted by length within groups of up to 50 steps.

        As in Transformers, the longest sample of all comes first, so that a lack of memory is
        detected at once. The group size stays that of the run's first attempt. In a run with
        Transformers' draws, the random order was drawn at the start of the epoch.
        """
        lengths, group = self.lengths, cursor.group
        groups_at_once = max(1, min(cursor.size // (group * 4), _GROUPS_MAX))
        sample_order = drawn_order(cursor) if cursor.drawn else Sampling().order(cursor)
        order: list[int] = sample_order.tolist()
        cuts = range(0, cursor.size, groups_at_once * group)
        groups = [
            sorted(order[cut : cut + groups_at_once * group], key=lengths.__getitem__, reverse=True)
            for cut in cuts
        ]
        longest = max(groups, key=lambda batch: lengths[batch[0]])
        groups[0][0], longest[0] = longest[0], groups[0][0]
        return torch.tensor([index for batch in groups for index in batch])


@dataclass(frozen=True, slots=True)
class Rebalanced(Sampling):
    """``batch_rebalance``: micro-batches of a step cost about the same, padding included.

    A step trains on the same samples as without rebalancing. The micro-batches of a step
    differ in size: few long samples or many short samples.

    Attributes:
        lengths: Length of each sample.
        accumulation: Micro-batches per step and rank.
    """

    lengths: Sequence[int]
    accumulation: int

    def batches(
        self, order: torch.Tensor, cursor: DataCursor, layout: BatchLayout, rank: int
    ) -> Iterator[list[int]]:
        """Yield the indices of this rank's micro-batches from the cursor to the epoch's end."""
        start = cursor.samples
        rounds = layout.rounds_after(start)
        for first_round in range(0, rounds, self.accumulation):
            slots = min(self.accumulation, rounds - first_round)
            low, groups = start + first_round * layout.round_samples, slots * layout.ranks
            high = min(low + slots * layout.round_samples, cursor.size)
            places = torch.arange(low, max(high, low + groups)) % cursor.size
            parts = split_by_cost(order[places].tolist(), self.lengths, groups)
            # Costliest first, so that the micro-batches of one round cost nearly the same.
            for slot in range(slots):
                yield parts[slot * layout.ranks + rank]


def cost_of(count: int, longest: int) -> float:
    """Return the cost of a micro-batch with all samples padded to the longest."""
    return count * longest * (1 + _QUADRATIC * longest)


def split_by_cost(indices: Sequence[int], lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Split ``indices`` into ``groups`` non-empty parts, minimizing the costliest part.

    Parts are consecutive in the order by length, longest first; the costliest part comes first.

    Raises:
        ValueError: There are fewer indices than groups.
    """
    if len(indices) < groups:
        raise ValueError(f"{len(indices)} samples cannot fill {groups} micro-batches")
    sorted_indices = sorted(indices, key=lengths.__getitem__, reverse=True)
    # A part begins with its longest sample, so these are all possible costs of a part.
    costs = sorted(
        {
            cost_of(count, lengths[first])
            for place, first in enumerate(sorted_indices)
            for count in range(1, len(sorted_indices) - place + 1)
        }
    )
    low, high = 0, len(costs) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_cut(sorted_indices, lengths, costs[middle])) <= groups:
            high = middle
        else:
            low = middle + 1
    parts = _cut(sorted_indices, lengths, costs[low])
    while len(parts) < groups:
        largest = max(range(len(parts)), key=lambda place: len(parts[place]))
        largest_part = parts[largest]
        parts[largest : largest + 1] = [
            largest_part[: len(largest_part) // 2],
            largest_part[len(largest_part) // 2 :],
        ]
    return sorted(parts, key=lambda part: -cost_of(len(part), lengths[part[0]]))


def _cut(ordered: Sequence[int], lengths: Sequence[int], cap: float) -> list[list[int]]:
    """Fill parts one after another, each up to a maximum cost."""
    parts: list[list[int]] = []
    for index in ordered:
        if parts and cost_of(len(parts[-1]) + 1, lengths[parts[-1][0]]) <= cap:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def sampling_for(args: TrainingArguments, dataset: Any, name: str) -> Sampling:
    """Return the sampling of a map-style dataset under ``args``.

    Args:
        args: ``train_sampling_strategy``, ``length_column_name``.
        dataset: Dataset whose samples, or one of its columns, have the lengths.
        name: Name of the model's main input; its length is used if the dataset has no column with
            lengths.

    Raises:
        ConfigError: Lengths are needed, and the samples have no length.
    """
    strategy = args.train_sampling_strategy
    if strategy == "sequential":
        return Sequential()
    if strategy == "random":
        return Sampling()
    lengths = lengths_of(dataset, args.length_column_name, name)
    if strategy == "group_by_length":
        return LengthGrouped(lengths)
    return Rebalanced(lengths, args.gradient_accumulation_steps)


def lengths_of(dataset: Any, column: str, name: str) -> list[int]:
    """Return the length of each sample: by column, else by the length of its main input.

    Unless the dataset itself has that column, every sample is fetched once.

    Raises:
        ConfigError: Samples have neither the column nor a main input with a length.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    first_sample = dataset[0]
    if isinstance(first_sample, Mapping) and column in first_sample:
        return [int(dataset[index][column]) for index in range(len(dataset))]
    if not isinstance(first_sample, Mapping) or not hasattr(first_sample.get(name), "__len__"):
        raise ConfigError(
            f"the lengths of the samples of `{type(dataset).__name__}` are unknown: give them "
            f"`{column}` (`length_column_name`) or `{name}`, or use another "
            "`train_sampling_strategy`"
        )
    return [len(dataset[index][name]) for index in range(len(dataset))]
