"""Evaluation loop, in which each rank evaluates a share of the data and every sample counts once.

The metrics are the same at any world size. The dataset is cut into batches in its own order, and
the batches are assigned to the ranks in turn. Ranks synchronize only to gather rows, every
``eval_accumulation_steps`` batches or at the end of the evaluation. The gathered rows are sorted
into the dataset's order. A dataset without a length is evaluated in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from resilient.errors import ConfigError
from resilient.train.data.loader_workers import end_workers_at_collection, read_batches
from resilient.train.data.sampler import DataCursor, worker_options
from resilient.train.data.streaming import StreamSource, stream_options
from resilient.train.evaluation.gather import (
    concatenate,
    gather_objects,
    gather_rows,
    is_column,
    nested,
    pad_and_concatenate,
    to_numpy,
    zipped,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.distributed.launch_env import World
    from resilient.train.arguments import TrainingArguments


@dataclass(frozen=True, slots=True)
class OutputJoin:
    """Rules for moving outputs off the device and joining them.

    Attributes:
        every: Number of batches after which outputs are gathered and moved off the device; None:
            only at the end.
        concat: Join batches; else keep a list of them.
        objects: Gather by pickling, so that outputs may contain more than tensors.
    """

    every: int | None = None
    concat: bool = True
    objects: bool = False

    @classmethod
    def of(cls, args: TrainingArguments) -> OutputJoin:
        """Return the rules of ``args``."""
        return cls(
            args.eval_accumulation_steps, args.eval_do_concat_batches, args.eval_use_gather_object
        )

    @property
    def by_pickle(self) -> bool:
        """True if batches stay separate until the end."""
        return self.objects or not self.concat


class OutputColumn:
    """One output of a rank over an evaluation: predictions, labels or inputs.

    Args:
        share: Batches of this rank.
        joining: Rules for joining the values.
    """

    def __init__(self, share: EvalShard, joining: OutputJoin) -> None:
        self._share = share
        self._joining = joining
        self._batches_held: list[Any] = []
        self._empty: Any = None
        self._spilled_batches: list[Any] = []

    def add(self, value: Any) -> None:
        """Keep the value of one more batch; the first dimension is samples."""
        self._batches_held.append(nested(torch.Tensor.detach, value))

    def flush(self) -> None:
        """Move the kept values off the device; tensors are gathered with other ranks. Collective.

        Every rank must flush all of its columns as often as the other ranks, even without kept
        values.
        """
        batches, self._batches_held = self._batches_held, []
        if self._joining.by_pickle:
            self._spilled_batches += (
                [] if self._share.is_stand_in else [nested(to_numpy, x) for x in batches]
            )
            return
        if batches:
            self._empty = zipped(batches[:1], _empty_like)
        if (joined_batches := zipped(batches or [self._empty], self._gathered)) is not None:
            self._spilled_batches.append(joined_batches)

    def result(self) -> Any:
        """Return the flushed values: arrays in the dataset's order, or a list of its batches.

        Collective.
        """
        return (
            self._batches()
            if self._joining.by_pickle
            else zipped(self._spilled_batches, self._ordered)
        )

    def _batches(self) -> Any:
        """Gather the batches of all ranks as objects and put them in order."""
        by_rank = gather_objects(self._spilled_batches, self._share.world.size)
        batch_numbers = range(self._share.batches)
        ordered_batches = [
            by_rank[turn % len(by_rank)][turn // len(by_rank)] for turn in batch_numbers
        ]
        if any(item is None for item in ordered_batches):
            return None
        return zipped(ordered_batches, concatenate) if self._joining.concat else ordered_batches

    def _gathered(self, leaves: Sequence[Any]) -> Any:
        """Join the leaves of this rank's batches, and gather those of the other ranks."""
        ranks, is_here = self._share.world.size, not self._share.is_stand_in
        if isinstance(leaves[0], torch.Tensor):
            rows = pad_and_concatenate(leaves)
            return gather_rows(rows if is_here else rows[:0], ranks).cpu()
        if ranks > 1 or not is_column(leaves[0]):
            raise ConfigError(
                f"the model returned a `{type(leaves[0]).__name__}`, which {ranks} ranks cannot "
                "gather as tensors: set `eval_use_gather_object`, or name that output in "
                "`ignore_keys`"
            )
        return concatenate(leaves)

    def _ordered(self, chunks: Sequence[Any]) -> Any:
        """Join the values of several flushes and put them into the dataset's order."""
        if not isinstance(chunks[0], torch.Tensor):
            return concatenate(chunks)  # Rows of one rank are already in order.
        rows, order = pad_and_concatenate(chunks), self._order()
        if len(order) != len(rows):
            raise ConfigError(
                f"the model returned {len(rows)} rows for {len(order)} samples: outputs need the "
                "samples as their first dimension"
            )
        return to_numpy(torch.empty_like(rows).index_copy_(0, torch.tensor(order), rows))

    def _order(self) -> list[int]:
        """Return the dataset positions of the gathered rows, ordered by flush, rank and batch."""
        shares = [self._share.of(rank) for rank in range(self._share.world.size)]
        interval = self._joining.every or max(len(shares[0]), 1)
        return [
            place
            for first in range(0, max(len(shares[0]), 1), interval)
            for batches in shares
            for batch in batches[first : first + interval]
            for place in batch
        ]


def _empty_like(leaves: Sequence[Any]) -> Any:
    is_tensor = isinstance(leaves[0], torch.Tensor)
    return (pad_and_concatenate(leaves) if is_tensor else leaves[0])[:0]


class EvalPrediction:
    """Argument of ``compute_metrics``, in the dataset's order; can be unpacked like a tuple.

    Attributes:
        predictions: An array, or a tuple or dict of arrays.
        label_ids: An array, or a tuple or dict of arrays.
        inputs: The model's main input, if ``include_for_metrics`` contains ``inputs``.
        losses: Mean loss of each sample's batch, if ``include_for_metrics`` contains ``loss``.
    """

    def __init__(
        self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None
    ) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, place: int) -> Any:
        return self.elements[place]

    @property
    def elements(self) -> tuple[Any, ...]:
        """Predictions and labels, then inputs and losses if they are present."""
        optional_elements = (item for item in (self.inputs, self.losses) if item is not None)
        return (self.predictions, self.label_ids, *optional_elements)


class PredictionOutput(NamedTuple):
    """Result of ``Trainer.predict``."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class EvalLoopOutput(NamedTuple):
    """Result of ``Trainer.evaluation_loop``."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float] | None
    num_samples: int | None


@dataclass(slots=True)
class EvalShard:
    """Batches of a dataset that a rank evaluates.

    Attributes:
        samples: Size of the dataset.
        batch: Samples per batch.
        world: World of the evaluating ranks.
        in_step: All ranks must run the same number of batches, because they compute together.
    """

    samples: int
    batch: int
    world: World
    in_step: bool = False

    @property
    def batches(self) -> int:
        """Number of batches in the dataset."""
        return math.ceil(self.samples / self.batch)

    def turns(self, rank: int) -> range:
        """Return the numbers of the batches of ``rank``."""
        return range(rank, self.batches, self.world.size)

    def of(self, rank: int) -> list[list[int]]:
        """Return the batches of ``rank`` as lists of indices."""
        return [
            list(range(turn * self.batch, min((turn + 1) * self.batch, self.samples)))
            for turn in self.turns(rank)
        ]

    @property
    def weights(self) -> list[int]:
        """Number of samples of each batch of the dataset."""
        full_batches, remainder = divmod(self.samples, self.batch)
        return [self.batch] * full_batches + ([remainder] if remainder else [])

    def mean(self, losses: Sequence[float]) -> float:
        """Return the mean over samples of the batches' ``losses``.

        Losses are weighted by their samples and added with ``math.fsum``, so the result is exact to
        the last bit for any number of ranks.
        """
        weighed = (size * loss for size, loss in zip(self.weights, losses, strict=True))
        return math.fsum(weighed) / self.samples

    def per_sample(self, losses: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the batches' losses repeated for each of their samples, float64."""
        return np.repeat(np.asarray(losses, dtype=np.float64), self.weights)

    def counts(self, nth: int) -> bool:
        """Return whether the ``nth`` batch run here belongs to this rank's share."""
        return nth < max(len(self.turns(self.world.rank)), 1)

    @property
    def is_stand_in(self) -> bool:
        """True if this rank has no batch. Such a rank runs the first batch to learn shapes."""
        return self.world.rank >= self.batches

    def local_batches(self) -> list[list[int]]:
        """Return the batches that this rank runs, at least one; surplus batches give no result."""
        own_batches = self.of(0)[:1] if self.is_stand_in else self.of(self.world.rank)
        repeated_batches = (
            math.ceil(self.batches / self.world.size) - len(own_batches) if self.in_step else 0
        )
        return own_batches + own_batches[-1:] * repeated_batches


class EvalShardLoader(DataLoader[Any]):
    """Loader of a share of a dataset.

    Args:
        dataset: Map-style dataset.
        share: Batches to load.
        **options: Options of DataLoader.
    """

    def __init__(self, dataset: Any, share: EvalShard, **options: Any) -> None:
        self.share = share
        super().__init__(dataset, batch_sampler=share.local_batches(), **options)

    def __iter__(self) -> Any:
        """Return the iterator over the batches."""
        is_kept = self.persistent_workers and self._iterator is not None
        batches = super().__iter__()
        if not is_kept:
            end_workers_at_collection(batches)
        return batches


def eval_loader(
    args: TrainingArguments,
    dataset: Any,
    share: EvalShard,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
    persistent: bool = False,
) -> EvalShardLoader:
    """Return a loader of this rank's share; torch's global random stream stays unchanged.

    Args:
        args: Arguments of the run.
        dataset: Map-style dataset.
        share: Batches to load.
        collate: Function from samples to a batch.
        pin: Whether batches go to pinned memory.
        persistent: Whether the loader's processes persist between evaluations.
    """
    options = worker_options(args, pin=pin)
    if options["num_workers"]:
        options["persistent_workers"] = persistent
    return EvalShardLoader(
        dataset,
        share,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(args.seed),
        **options,
    )


class EvalAccumulator:
    """Losses and outputs of one rank in an evaluation.

    Args:
        share: Batches of this rank.
        keep_outputs: Keep predictions, labels and inputs too, not only losses.
        joining: Rules for joining the outputs of batches.
    """

    def __init__(
        self, share: EvalShard, *, keep_outputs: bool, joining: OutputJoin | None = None
    ) -> None:
        self._share = share
        self._keep = keep_outputs
        self._joining = joining or OutputJoin()
        self._losses: list[torch.Tensor] = []
        self._columns = [
            OutputColumn(share, self._joining) for _ in ("predictions", "labels", "inputs")
        ]
        self._sample_count = 0
        self._flushes = 0

    def add(
        self, loss: torch.Tensor | None, predictions: Any, labels: Any, inputs: Any = None
    ) -> None:
        """Add one batch: its mean loss (scalar), and its outputs (first dimension: samples).

        Batches after this rank's share only keep the number of batches equal on all ranks, and are
        dropped. Collective after every ``joining.every`` batches.
        """
        if self._share.counts(self._sample_count):
            if loss is not None:
                self._losses.append(loss.detach().double())
            if self._keep:
                for column, value in zip(self._columns, (predictions, labels, inputs), strict=True):
                    column.add(value)
        self._sample_count += 1
        if self._joining.every and self._sample_count % self._joining.every == 0:
            self._flush()

    def losses(self) -> list[float] | None:
        """Return the mean loss of each batch of the dataset; None without labels. Collective."""
        self._finish()
        if not self._losses:
            return None
        share = self._share
        own_losses = torch.stack(self._losses)
        rows = gather_rows(own_losses[:0] if share.is_stand_in else own_losses, share.world.size)
        owners = [turn for rank in range(share.world.size) for turn in share.turns(rank)]
        by_turn = dict(zip(owners, rows.tolist(), strict=True))
        return [by_turn[turn] for turn in range(share.batches)]

    def mean_loss(self) -> float | None:
        """Return the mean loss over samples; None without labels. Collective."""
        losses = self.losses()
        return None if losses is None else self._share.mean(losses)

    def outputs(self) -> tuple[Any, Any, Any]:
        """Return predictions, labels and inputs in the dataset's order. Collective."""
        if not self._keep:
            return None, None, None
        self._finish()
        predictions, labels, inputs = (column.result() for column in self._columns)
        return predictions, labels, inputs

    def _finish(self) -> None:
        """Flush as often as the rank with the most batches, before any other collective."""
        rounds = max(1, -(-self._share.batches // self._share.world.size))
        for _ in range(self._flushes, -(-rounds // (self._joining.every or rounds))):
            self._flush()

    def _flush(self) -> None:
        self._flushes += 1
        for column in self._columns if self._keep else ():
            column.flush()


def require_metric(sets: Mapping[str, Any] | None, metric: str, option: str) -> None:
    """Raise if no evaluation of these datasets gives a metric.

    Args:
        sets: Datasets by name; None if there is only one.
        metric: Name of the metric, with or without ``eval_``.
        option: Argument that needs the metric.

    Raises:
        ConfigError: The name belongs to none of the datasets.
    """
    name = f"eval_{metric.removeprefix('eval_')}"
    if sets and not any(name.startswith(f"eval_{group}_") for group in sets):
        set_name = next(iter(sets))
        raise ConfigError(
            f"{option} is `{name}`, but metrics of the datasets {sorted(sets)} of `eval_dataset` "
            "are named after them",
            hint=f'set `metric_for_best_model`, for example to "{set_name}_loss"',
        )


def prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``metrics`` with the prefix ``prefix_`` on every name."""
    return {
        name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
        for name, value in metrics.items()
    }


@dataclass(slots=True)
class StreamShare(EvalShard):
    """Batches of a stream that a rank evaluates; ``samples`` counts those seen so far."""

    own: list[bool] = field(default_factory=list)

    def count_round(self, taken: int, *, runs: bool, own: bool) -> None:
        """Count the samples of one round of all ranks.

        Args:
            taken: Number of samples.
            runs: Whether a batch runs here.
            own: Whether the batch belongs to this rank's share.
        """
        self.samples += taken
        if runs:
            self.own.append(own)

    def counts(self, nth: int) -> bool:
        """Return whether the ``nth`` batch run here belongs to this rank's share."""
        return self.own[nth] or nth == 0


class _Part(NamedTuple):
    """Part of a round for one rank: own samples, or samples that only equalize batch counts."""

    samples: list[Any]
    taken: int
    own: bool


class _Reader(IterableDataset[_Part]):
    def __init__(self, dataset: Any, seed: int, share: StreamShare) -> None:
        self._dataset = dataset
        self._seed = seed
        self._batch, self._world, self._in_step = share.batch, share.world, share.in_step

    def __iter__(self) -> Iterator[_Part]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for turn, part in enumerate(self._parts()):
            if turn % workers == worker:
                yield part

    def _parts(self) -> Iterator[_Part]:
        source = StreamSource(self._dataset, DataCursor(0, self._seed))
        low, keeps_step = self._world.rank * self._batch, True
        while samples := source.take(self._batch * self._world.size):
            own_samples = samples[low : low + self._batch]
            # The first round runs on every rank, so that all ranks know the shapes.
            stand_in = samples[: self._batch] if keeps_step else []
            yield _Part(own_samples or stand_in, len(samples), bool(own_samples))
            keeps_step = self._in_step


class StreamEvaluation:
    """Loader of a stream for evaluation; its share knows the size when the stream was read.

    Args:
        loader: Yields collated parts.
        share: Counts the samples.
        dataset: The stream.
    """

    def __init__(self, loader: DataLoader[Any], share: StreamShare, dataset: Any) -> None:
        self.dataset = dataset
        self.share = share
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch, sample_count, is_own in read_batches(self._loader):
            runs = batch is not None
            self.share.count_round(sample_count, runs=runs, own=is_own)
            if runs:
                yield batch


class _CollatePart:
    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, part: _Part) -> tuple[Any, int, bool]:
        return (self._collate(part.samples) if part.samples else None), part.taken, part.own


def stream_evaluation(
    args: TrainingArguments,
    dataset: Any,
    share: StreamShare,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
) -> StreamEvaluation:
    """Return a loader of this rank's share of a stream."""
    options = stream_options(args, pin=pin)
    reader = _Reader(dataset, args.order_seed, share)
    collate_fn = cast("Any", _CollatePart(collate))
    return StreamEvaluation(
        DataLoader(reader, batch_size=None, collate_fn=collate_fn, **options), share, dataset
    )
