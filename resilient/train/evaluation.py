"""Evaluation: each rank its share, every sample counted once, the same result at any world size.

Batches of the dataset's own order are dealt to ranks in turn. Ranks meet only at the end, where
rows are gathered and put back into the dataset's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from resilient.errors import ConfigError
from resilient.train.data import worker_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from resilient.train.arguments import TrainingArguments
    from resilient.world.world import World

# What rows shorter than the longest are filled with; losses and metrics ignore it (Transformers).
_PADDING = -100


class EvalPrediction(NamedTuple):
    """What ``compute_metrics`` gets: NumPy arrays (or tuples of them) in the dataset's order."""

    predictions: Any
    label_ids: Any


class PredictionOutput(NamedTuple):
    """What ``Trainer.predict`` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Share:
    """Which batches of ``samples`` a rank evaluates.

    Attributes:
        samples: size of the dataset.
        batch: samples per batch.
        world: who this rank is among how many.
        in_step: every rank must run as many batches as the others, because they compute together.
    """

    samples: int
    batch: int
    world: World
    in_step: bool = False

    @property
    def batches(self) -> int:
        """Batches in the dataset."""
        return math.ceil(self.samples / self.batch)

    def of(self, rank: int) -> list[list[int]]:
        """Return the batches of ``rank`` as lists of indices."""
        return [
            list(range(turn * self.batch, min((turn + 1) * self.batch, self.samples)))
            for turn in range(rank, self.batches, self.world.size)
        ]

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has no batch, and runs the first one only to know its shapes."""
        return self.world.rank >= self.batches

    def mine(self) -> list[list[int]]:
        """Return the batches to run here, at least one; those past the share only keep step."""
        own = self.of(0)[:1] if self.is_stand_in else self.of(self.world.rank)
        missing = math.ceil(self.batches / self.world.size) - len(own) if self.in_step else 0
        return own + own[-1:] * missing


def eval_loader(
    args: TrainingArguments,
    dataset: Any,
    share: Share,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
) -> DataLoader[Any]:
    """Return a loader of this rank's share; it leaves torch's global random stream alone."""
    options = worker_options(args, pin=pin) | {"persistent_workers": False}
    return DataLoader(
        dataset,
        batch_sampler=share.mine(),
        collate_fn=collate,
        generator=torch.Generator().manual_seed(args.seed),
        **options,
    )


class Tally:
    """What one rank has seen of an evaluation.

    Args:
        share: which batches are this rank's.
        keep_outputs: whether predictions and labels are kept, not only losses.
    """

    def __init__(self, share: Share, *, keep_outputs: bool) -> None:
        self._share = share
        self._keep = keep_outputs
        self._losses: list[torch.Tensor] = []
        self._predictions: list[Any] = []
        self._labels: list[Any] = []
        self._left = max(len(share.of(share.world.rank)), 1)

    def add(self, loss: torch.Tensor | None, predictions: Any, labels: Any) -> None:
        """Add one batch: its mean loss (scalar), and its outputs (first dimension: samples).

        What comes after this rank's share was run to keep step, and is dropped.
        """
        if self._left == 0:
            return
        self._left -= 1
        if loss is not None:
            self._losses.append(loss.detach().double())
        if self._keep:
            self._predictions.append(_detached(predictions))
            self._labels.append(_detached(labels))

    def mean_loss(self) -> float | None:
        """Return the mean loss over samples, None without labels. Collective.

        Losses of batches are weighed by their samples and added with ``math.fsum``, so the
        result is exact to the last bit whatever the number of ranks.
        """
        if not self._losses:
            return None
        share = self._share
        rows = _gather_rows(self._kept(torch.stack(self._losses)), share.world.size)
        owners = [turn for rank in range(share.world.size) for turn in _turns(share, rank)]
        by_turn = dict(zip(owners, rows.tolist(), strict=True))
        weights = [
            min(share.batch, share.samples - turn * share.batch) for turn in range(share.batches)
        ]
        weighed = (weights[turn] * by_turn[turn] for turn in range(share.batches))
        return math.fsum(weighed) / share.samples

    def outputs(self) -> tuple[Any, Any]:
        """Return predictions and labels of all samples in the dataset's order. Collective."""
        return self._joined(self._predictions), self._joined(self._labels)

    def _joined(self, batches: list[Any]) -> Any:
        """Join batches of tensors, or of tuples or dicts of them, and gather them as NumPy."""
        first = batches[0] if batches else None
        if first is None:
            return None
        if isinstance(first, torch.Tensor):
            return self._gathered(batches)
        if isinstance(first, Mapping):
            return {name: self._joined([one[name] for one in batches]) for name in first}
        return tuple(self._joined(list(column)) for column in zip(*batches, strict=True))

    def _gathered(self, batches: list[torch.Tensor]) -> Any:
        size = self._share.world.size
        rows = _gather_rows(self._kept(_pad_and_concatenate(batches)), size)
        order = [at for rank in range(size) for batch in self._share.of(rank) for at in batch]
        if len(order) != len(rows):
            raise ConfigError(
                f"the model returned {len(rows)} rows for {len(order)} samples: outputs need the "
                "samples as their first dimension"
            )
        places = torch.tensor(order, device=rows.device)
        sorted_rows = torch.empty_like(rows).index_copy_(0, places, rows).cpu()
        half = sorted_rows.dtype in {torch.bfloat16, torch.float16}
        return (sorted_rows.float() if half else sorted_rows).numpy()

    def _kept(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:0] if self._share.is_stand_in else rows


def _turns(share: Share, rank: int) -> range:
    return range(rank, share.batches, share.world.size)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {name: _detached(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(_detached(one) for one in value)
    return value


def _pad_to(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return ``rows`` enlarged to ``shape`` at the ends, filled with -100."""
    if list(rows.shape) == list(shape):
        return rows
    padded = rows.new_full(tuple(shape), _PADDING)
    padded[tuple(slice(0, length) for length in rows.shape)] = rows
    return padded


def _pad_and_concatenate(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the samples; other dimensions are padded to the largest."""
    rest = [max(lengths) for lengths in zip(*(one.shape[1:] for one in batches), strict=True)]
    return torch.cat([_pad_to(one, [len(one), *rest]) for one in batches])


def _gather_rows(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the rows of all ranks, in the order of ranks; their numbers may differ. Collective."""
    if ranks == 1:
        return rows
    shape = torch.tensor(rows.shape, device=rows.device)
    shapes = [torch.empty_like(shape) for _ in range(ranks)]
    dist.all_gather(shapes, shape)
    largest = torch.stack(shapes).amax(0).tolist()
    mine = _pad_to(rows, largest).contiguous()
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    return torch.cat([one[: int(shape[0])] for one, shape in zip(gathered, shapes, strict=True)])


def prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``metrics`` with every name under ``prefix_``."""
    return {
        name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
        for name, value in metrics.items()
    }


def plain_numbers(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield metrics with NumPy and tensor scalars as Python numbers, as JSON needs them."""
    for name, value in metrics.items():
        yield name, value.item() if hasattr(value, "item") else value
