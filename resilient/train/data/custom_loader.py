"""A user's own train loaders: rebuilt with the sampler of the run, or refused.

A plain torch ``DataLoader`` does not save its position. With such a loader, training would begin at
the start of an epoch after every restart, and all ranks would get the same samples. If the loader
has only a dataset and a sequential or random order, the run's sampler can replace the loader's
sampler. Any other loader is refused, because the run's sampler would change its batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from resilient.errors import ConfigError
from resilient.events import Event
from resilient.train.arguments.derived import is_canonical
from resilient.train.data.ordering import Sampling, Sequential
from resilient.train.data.sampler import KeyedDataset, claim_workers, ignore_stop_signals
from resilient.train.data.streaming import StreamLoader

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.train.arguments import TrainingArguments
    from resilient.train.data.sampler import ResumableSampler

_HOW = (
    "return the loader of `super().get_train_dataloader()`, or `DataLoader(KeyedDataset(dataset), "
    "batch_sampler=self.train_sampler, collate_fn=...)` with `KeyedDataset` of "
    "resilient.train.data.sampler; for another order override `train_sampling`"
)


@dataclass(frozen=True, slots=True)
class LoaderRebuilt(Event):
    """The script's own train loader was rebuilt around the run's sampler."""

    template: ClassVar[str] = (
        "the loader of `get_train_dataloader` was created again with the run's sampler, so that "
        "ranks share the samples and a resume finds its position; order: {order}"
    )
    order: str


def resumable_loader(
    args: TrainingArguments, loader: Any, sampler: ResumableSampler
) -> DataLoader[Any] | StreamLoader:
    """Return the given loader, or a rebuilt one, with iterators that begin at the run's position.

    Args:
        args: Arguments; the loader's batches must agree with them.
        loader: Result of ``get_train_dataloader``. A loader of any class is returned unchanged if
            its ``batch_sampler`` is the run's sampler.
        sampler: Sampler of the run, which adopts the order of the rebuilt loader.

    Raises:
        ConfigError: The loader has its own sampler, batches or samples.
    """
    if isinstance(loader, StreamLoader) or getattr(loader, "batch_sampler", None) is sampler:
        unchanged_loader: DataLoader[Any] | StreamLoader = loader
        return unchanged_loader
    order = _require_plain(args, loader, sampler)
    if type(order) is not type(sampler.sampling):
        sampler.sampling = order
    return _around(args, loader, sampler)


def _require_plain(args: TrainingArguments, loader: Any, sampler: ResumableSampler) -> Sampling:
    """Return the order of a loader; refuse settings that the run's sampler does not have."""
    if type(loader) is not DataLoader:
        raise _refused(f"a `{type(loader).__name__}`")
    if type(loader.batch_sampler) is not BatchSampler:
        raise _refused(f"batches of a `{type(loader.batch_sampler).__name__}`")
    batch, drops_last = args.per_device_train_batch_size, args.dataloader_drop_last
    if loader.batch_size != batch:
        raise _refused(f"batch_size={loader.batch_size}, and `per_device_train_batch_size`={batch}")
    if loader.drop_last != drops_last:
        raise _refused(f"drop_last={loader.drop_last}, and `dataloader_drop_last`={drops_last}")
    dataset: Any = loader.dataset
    samples = len(dataset) if hasattr(dataset, "__len__") else "an unknown number of"
    if samples != sampler.layout.samples:
        raise _refused(f"{samples} samples, and `train_dataset` has {sampler.layout.samples}")
    return _require_order(loader.sampler, sampler.layout.samples, sampler.sampling)


def _require_order(inner: Any, samples: int, sampling: Sampling) -> Sampling:
    """Return the order that corresponds to a torch sampler."""
    if type(sampling) not in {Sampling, Sequential}:
        raise _refused(f"an order beside that of `{sampling.name}`")
    if type(inner) is SequentialSampler:
        return Sequential()
    is_whole = type(inner) is RandomSampler and not inner.replacement
    if not is_whole or inner.num_samples != samples:
        raise _refused(f"its own `{type(inner).__name__}`")
    return Sampling()


def _refused(subject: str) -> ConfigError:
    return ConfigError(
        f"the loader of `get_train_dataloader` has {subject}: the run could not know which samples "
        "it has trained on, so a resume would repeat some and skip others",
        hint=_HOW,
    )


def _around(
    args: TrainingArguments, loader: DataLoader[Any], sampler: ResumableSampler
) -> DataLoader[Any]:
    """Return a loader of the same samples and options that begins at the run's position."""
    options: dict[str, Any] = {}
    if loader.num_workers:
        claim_workers()
        options = {
            "persistent_workers": loader.persistent_workers,
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
            "worker_init_fn": partial(_begin_worker, loader.worker_init_fn),
        }
    return DataLoader(
        KeyedDataset(loader.dataset, always=is_canonical(args)),
        batch_sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        generator=torch.Generator().manual_seed(sampler.cursor.seed),
        **options,
    )


def _begin_worker(user_init: Callable[[int], None] | None, worker: int) -> None:
    ignore_stop_signals(worker)
    if user_init is not None:
        user_init(worker)
