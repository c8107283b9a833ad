"""Evaluation of a dataset without a length: every sample once, on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from resilient.train.data.sampling import Cursor
from resilient.train.data.stream_reading import Source
from resilient.train.data.streams import stream_options
from resilient.train.evaluation.evaluate import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.train.arguments import TrainingArguments


@dataclass(slots=True)
class StreamShare(Share):
    """Which batches of a stream a rank evaluates; ``samples`` are those that were seen so far."""

    own: list[bool] = field(default_factory=list)

    def saw(self, taken: int, *, runs: bool, own: bool) -> None:
        """Count the samples of one round of all ranks.

        Args:
            taken: how many there were.
            runs: whether a batch runs here.
            own: whether it is of this rank's share.
        """
        self.samples += taken
        if runs:
            self.own.append(own)

    def counts(self, nth: int) -> bool:
        """Say whether the ``nth`` batch that runs here is one of this rank's share."""
        return self.own[nth] or nth == 0


class _Part(NamedTuple):
    """One rank's part of a round: its samples, or others' that only keep it in step."""

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
        mine, workers = (info.id, info.num_workers) if info else (0, 1)
        for turn, one in enumerate(self._parts()):
            if turn % workers == mine:
                yield one

    def _parts(self) -> Iterator[_Part]:
        source = Source(self._dataset, Cursor(0, self._seed))
        low, keeps_step = self._world.rank * self._batch, True
        while samples := source.take(self._batch * self._world.size):
            own = samples[low : low + self._batch]
            # The first round runs everywhere, so that all know the shapes.
            stand_in = samples[: self._batch] if keeps_step else []
            yield _Part(own or stand_in, len(samples), bool(own))
            keeps_step = self._in_step


class StreamEvaluation:
    """Loads a stream for evaluation; its share knows the size when it was read.

    Args:
        loader: yields collated parts.
        share: counts them.
    """

    def __init__(self, loader: DataLoader[Any], share: StreamShare) -> None:
        self.share = share
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch, taken, own in self._loader:
            runs = batch is not None
            self.share.saw(taken, runs=runs, own=own)
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
        DataLoader(reader, batch_size=None, collate_fn=collate_fn, **options), share
    )
