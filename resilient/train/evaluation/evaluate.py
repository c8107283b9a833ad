"""Evaluation: each rank its share, every sample counted once, the same result at any world size.

Batches of the dataset's own order are dealt to ranks in turn. Ranks meet only to gather rows, at
the end or every ``eval_accumulation_steps`` batches, and put them back into the dataset's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from resilient.errors import ConfigError
from resilient.train.data.sampling import worker_options
from resilient.train.evaluation.columns import Column, Joining
from resilient.train.evaluation.gather import gather_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from resilient.train.arguments import TrainingArguments
    from resilient.world.world import World


class EvalPrediction:
    """What ``compute_metrics`` gets, in the dataset's order; unpacks as a tuple of what is there.

    Attributes:
        predictions: an array, or a tuple or dict of them.
        label_ids: the same.
        inputs: the model's main input, if ``include_for_metrics`` has ``inputs``.
        losses: each sample's batch's mean loss, if ``include_for_metrics`` has ``loss``.
    """

    def __init__(
        self, predictions: Any, label_ids: Any, inputs: Any = None, losses: Any = None
    ) -> None:
        self.predictions = predictions
        self.label_ids = label_ids
        self.inputs = inputs
        self.losses = losses

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements)

    def __len__(self) -> int:
        return len(self._elements)

    def __getitem__(self, place: int) -> Any:
        return self._elements[place]

    @property
    def _elements(self) -> tuple[Any, ...]:
        more = (one for one in (self.inputs, self.losses) if one is not None)
        return (self.predictions, self.label_ids, *more)


class PredictionOutput(NamedTuple):
    """What ``Trainer.predict`` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


@dataclass(slots=True)
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
        """How many samples each batch of the dataset has."""
        whole, rest = divmod(self.samples, self.batch)
        return [self.batch] * whole + ([rest] if rest else [])

    def mean(self, losses: Sequence[float]) -> float:
        """Return the mean over samples of ``losses`` of batches.

        They are weighed by their samples and added with ``math.fsum``, so the result is exact to
        the last bit whatever the number of ranks.
        """
        weighed = (size * loss for size, loss in zip(self.weights, losses, strict=True))
        return math.fsum(weighed) / self.samples

    def spread(self, losses: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the losses of batches once for each of their samples, float64."""
        return np.repeat(np.asarray(losses, dtype=np.float64), self.weights)

    def counts(self, nth: int) -> bool:
        """Say whether the ``nth`` batch that runs here is one of this rank's share."""
        return nth < max(len(self.turns(self.world.rank)), 1)

    @property
    def is_stand_in(self) -> bool:
        """Whether this rank has no batch, and runs the first one only to know its shapes."""
        return self.world.rank >= self.batches

    def mine(self) -> list[list[int]]:
        """Return the batches to run here, at least one; those past the share only keep step."""
        own = self.of(0)[:1] if self.is_stand_in else self.of(self.world.rank)
        missing = math.ceil(self.batches / self.world.size) - len(own) if self.in_step else 0
        return own + own[-1:] * missing


class ShareLoader(DataLoader[Any]):
    """Loads the batches of a share of a dataset.

    Args:
        dataset: map-style.
        share: which batches.
        **options: of DataLoader.
    """

    def __init__(self, dataset: Any, share: Share, **options: Any) -> None:
        self.share = share
        super().__init__(dataset, batch_sampler=share.mine(), **options)


def eval_loader(
    args: TrainingArguments,
    dataset: Any,
    share: Share,
    collate: Callable[[Any], Any],
    *,
    pin: bool,
    persistent: bool = False,
) -> ShareLoader:
    """Return a loader of this rank's share; it leaves torch's global random stream alone.

    Args:
        args: of the run.
        dataset: map-style.
        share: which batches.
        collate: samples -> batch.
        pin: whether batches go to pinned memory.
        persistent: whether the loader's processes live on between evaluations.
    """
    options = worker_options(args, pin=pin)
    if options["num_workers"]:
        options["persistent_workers"] = persistent
    return ShareLoader(
        dataset,
        share,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(args.seed),
        **options,
    )


class Tally:
    """What one rank has seen of an evaluation.

    Args:
        share: which batches are this rank's.
        keep_outputs: whether predictions, labels and inputs are kept, not only losses.
        joining: how outputs of batches become one.
    """

    def __init__(self, share: Share, *, keep_outputs: bool, joining: Joining | None = None) -> None:
        self._share = share
        self._keep = keep_outputs
        self._joining = joining or Joining()
        self._losses: list[torch.Tensor] = []
        self._columns = [Column(share, self._joining) for _ in ("predictions", "labels", "inputs")]
        self._seen = 0
        self._spills = 0

    def add(
        self, loss: torch.Tensor | None, predictions: Any, labels: Any, inputs: Any = None
    ) -> None:
        """Add one batch: its mean loss (scalar), and its outputs (first dimension: samples).

        What comes after this rank's share was run to keep step, and is dropped. Collective after
        every ``joining.every`` batches.
        """
        if self._share.counts(self._seen):
            if loss is not None:
                self._losses.append(loss.detach().double())
            if self._keep:
                for column, value in zip(self._columns, (predictions, labels, inputs), strict=True):
                    column.add(value)
        self._seen += 1
        if self._joining.every and self._seen % self._joining.every == 0:
            self._spill()

    def losses(self) -> list[float] | None:
        """Return the mean loss of each batch of the dataset, None without labels. Collective."""
        self._finish()
        if not self._losses:
            return None
        share = self._share
        mine = torch.stack(self._losses)
        rows = gather_rows(mine[:0] if share.is_stand_in else mine, share.world.size)
        owners = [turn for rank in range(share.world.size) for turn in share.turns(rank)]
        by_turn = dict(zip(owners, rows.tolist(), strict=True))
        return [by_turn[turn] for turn in range(share.batches)]

    def mean_loss(self) -> float | None:
        """Return the mean loss over samples, None without labels. Collective."""
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
        """Spill as often as the rank with the most batches, before anything else is gathered."""
        rounds = max(1, -(-self._share.batches // self._share.world.size))
        for _ in range(self._spills, -(-rounds // (self._joining.every or rounds))):
            self._spill()

    def _spill(self) -> None:
        self._spills += 1
        for column in self._columns if self._keep else ():
            column.spill()


def require_metric(sets: Mapping[str, Any] | None, metric: str, who: str) -> None:
    """Raise if no evaluation of a dict of datasets can give a metric.

    Args:
        sets: datasets by name; None if there is only one.
        metric: its name, with ``eval_`` or without.
        who: what needs it.

    Raises:
        ConfigError: the name is of none of them.
    """
    name = f"eval_{metric.removeprefix('eval_')}"
    if sets and not any(name.startswith(f"eval_{one}_") for one in sets):
        first = next(iter(sets))
        raise ConfigError(
            f"{who} is `{name}`, and metrics of the datasets {sorted(sets)} of `eval_dataset` are "
            "named after them",
            hint=f'set `metric_for_best_model`, as to "{first}_loss"',
        )


def prefixed(metrics: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return ``metrics`` with every name under ``prefix_``."""
    return {
        name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value
        for name, value in metrics.items()
    }
