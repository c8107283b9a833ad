"""Evaluation with a user's own loaders: sample counts, and metrics computed batch by batch.

With ``batch_eval_metrics``, metrics are computed batch by batch, without storing predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from resilient.errors import ConfigError
from resilient.train.data.loader_workers import read_batches
from resilient.train.evaluation.gather import first_of, gather_objects, nested
from resilient.train.evaluation.loop import EvalPrediction, EvalShard, EvalShardLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.distributed.launch_env import World


@dataclass(slots=True)
class CountedShard(EvalShard):
    """All batches of a loader on one rank; ``samples`` and ``sizes`` count the batches seen."""

    sizes: list[int] = field(default_factory=list)

    def count_batch(self, size: int) -> None:
        """Count one batch."""
        self.sizes.append(size)
        self.samples += size

    @property
    def batches(self) -> int:
        """Number of batches seen."""
        return len(self.sizes)

    @property
    def weights(self) -> list[int]:
        """Number of samples of each batch seen."""
        return self.sizes

    def of(self, rank: int) -> list[list[int]]:
        """Return the sample positions of the batches seen, in order of arrival."""
        total = list(accumulate(self.sizes))
        ends = [total[nth] for nth in self.turns(rank)]
        return [list(range(end - size, end)) for end, size in zip(ends, self.sizes, strict=True)]

    def counts(self, nth: int) -> bool:
        """Return True: every batch counts."""
        return nth < self.batches


class CountedBatches:
    """Loader wrapper that counts the samples of each batch.

    Args:
        loader: Yields batches.
        world: World of one rank.
    """

    def __init__(self, loader: Any, world: World) -> None:
        self.loader = loader
        self.share = CountedShard(0, 1, world)

    def __iter__(self) -> Iterator[Any]:
        for inputs in read_batches(self.loader):
            size = samples_of(inputs)
            if size is None:
                raise ConfigError(
                    "cannot count the samples of an evaluation batch: it is a "
                    f"`{type(inputs).__name__}` without a tensor or a list",
                    hint="return the loader of `super().get_eval_dataloader(...)`",
                )
            self.share.count_batch(size)
            yield inputs


def samples_of(inputs: Any) -> int | None:
    """Return the length of the first tensor or list in a batch; None if there is none."""
    if hasattr(inputs, "shape"):
        return int(inputs.shape[0]) if len(inputs.shape) else None
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    elif isinstance(inputs, list) and not any(isinstance(value, torch.Tensor) for value in inputs):
        return len(inputs)
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        return None
    sizes = (samples_of(value) for value in inputs)
    return next((size for size in sizes if size is not None), None)


def counted(loader: Any, world: World, *, in_step: bool) -> Any:
    """Return a loader with a ``share``; every sample of ``loader`` counts once in it.

    Loaders of this package have a share and stay unchanged. A single rank counts the samples that
    the loader yields. Several ranks share the batches of a plain loader in the order of its
    dataset.

    Args:
        loader: Result of ``get_eval_dataloader``.
        world: World of the ranks with separate samples.
        in_step: Whether all ranks must run the same number of batches.

    Raises:
        ConfigError: Several ranks cannot share this loader's samples.
    """
    if getattr(loader, "share", None) is not None:
        return loader
    if world.size == 1:
        return CountedBatches(loader, world)
    is_plain = type(loader) is DataLoader and type(loader.batch_sampler) is BatchSampler
    if not is_plain or type(loader.sampler) is not SequentialSampler or loader.drop_last:
        raise ConfigError(
            f"the loader of `get_eval_dataloader`, a `{type(loader).__name__}`, would give each "
            f"of {world.size} ranks the same samples, in its own order",
            hint="return the loader of `super().get_eval_dataloader(...)`, or create a "
            "`DataLoader` without shuffling and without a sampler",
        )
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn")
    }
    if loader.num_workers:
        options["prefetch_factor"] = loader.prefetch_factor
        options["multiprocessing_context"] = loader.multiprocessing_context
    dataset: Any = loader.dataset
    share = EvalShard(len(dataset), int(loader.batch_size or 1), world, in_step=in_step)
    return EvalShardLoader(dataset, share, generator=torch.Generator(), **options)


class BatchMetrics:
    """Accumulator that calls ``compute_metrics(prediction, compute_result=...)`` for each batch.

    Every rank makes the same calls, in the dataset's order, for any number of ranks. All ranks
    must therefore run the same number of batches (``in_step`` of the share). Tensors are on the
    host.

    Args:
        compute: Accumulates over batches, and returns metrics if ``compute_result`` is true.
        share: Batches of this rank.
        include: ``include_for_metrics``.
    """

    def __init__(self, compute: Callable[..., Any], share: EvalShard, include: list[str]) -> None:
        self._compute = compute
        self._share = share
        self._include = include
        self._sample_count = 0
        self._last: EvalPrediction | None = None

    def add(self, loss: torch.Tensor | None, predictions: Any, labels: Any, inputs: Any) -> None:
        """Process one batch of each rank. Collective."""
        batch_loss = None
        if self._share.counts(self._sample_count) and not self._share.is_stand_in:
            batch_loss = nested(_on_host, (predictions, labels, inputs, loss))
        self._sample_count += 1
        for value in gather_objects(batch_loss, self._share.world.size):
            if value is not None:
                self._take(*value)

    def result(self) -> Mapping[str, Any]:
        """Return the metrics from the last call."""
        if self._last is None:
            return {}
        metrics: Mapping[str, Any] = self._compute(self._last, compute_result=True)
        return metrics

    def _take(self, predictions: Any, labels: Any, inputs: Any, loss: Any) -> None:
        """Process the previous batch, because a batch is the last one only if no other follows."""
        if predictions is None or labels is None:
            return
        if self._last is not None:
            self._compute(self._last, compute_result=False)
        losses = None
        if loss is not None and "loss" in self._include:
            losses = loss.repeat(len(first_of(predictions)))
        self._last = EvalPrediction(
            predictions, labels, inputs if "inputs" in self._include else None, losses
        )


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu()
