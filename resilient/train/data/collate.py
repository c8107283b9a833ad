"""Collators, and the removal of columns that the model's forward does not accept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

# Names that the default collator renames to `labels`.
_LABELS = ("label", "label_ids")


def taken_columns(model: nn.Module, labels: Sequence[str]) -> frozenset[str] | None:
    """Return the names that a model's forward takes, and all names of labels.

    Return None if the forward accepts any name (``**kwargs``). The ``**kwargs`` of Transformers
    models are options, not columns.
    """
    get_base = getattr(model, "get_base_model", None)
    base: Any = get_base() if get_base else model
    parameters = inspect.signature(base.forward).parameters
    takes_all = any(value.kind is value.VAR_KEYWORD for value in parameters.values())
    if takes_all and not hasattr(base, "main_input_name"):
        return None
    return frozenset((*parameters, *labels, *_LABELS))


class PruningCollator:
    """Collator that first drops the columns that a model does not take.

    Args:
        collate: Function from samples to a batch.
        taken: Names that are kept.
        model: Name of the model, for messages.
        emit: Function that gets the dropped names; not called in a loader's process.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        taken: frozenset[str],
        model: str,
        emit: Callable[[tuple[str, ...]], None] | None = None,
    ) -> None:
        self._collate = collate
        self._accepted_columns = taken
        self._model = model
        self._emit = emit

    def __reduce__(self) -> tuple[Any, ...]:
        return PruningCollator, (self._collate, self._accepted_columns, self._model)

    def __call__(self, features: Sequence[Any]) -> Any:
        """Collate samples; samples that are not mappings have no names and are not pruned.

        Raises:
            ConfigError: No column is left.
        """
        if not isinstance(features[0], Mapping):
            return self._collate(features)
        if self._accepted_columns.issuperset(chain.from_iterable(features)):
            return self._collate(features)
        pruned_features = [
            {name: value for name, value in feature.items() if name in self._accepted_columns}
            for feature in features
        ]
        if not pruned_features[0]:
            raise _nothing_left(features[0], self._accepted_columns, self._model)
        if self._emit is not None and get_worker_info() is None:
            self._emit(tuple(name for name in features[0] if name not in self._accepted_columns))
        return self._collate(pruned_features)


def prune_dataset(dataset: Any, taken: frozenset[str], model: str) -> tuple[Any, tuple[str, ...]]:
    """Return a Hugging Face dataset without unused columns, and the dropped names.

    Any other dataset is returned unchanged.

    Raises:
        ConfigError: No column would be left.
    """
    columns = getattr(dataset, "column_names", None)
    if not columns or not hasattr(dataset, "remove_columns"):
        return dataset, ()
    unused_columns = tuple(name for name in columns if name not in taken)
    if len(unused_columns) == len(columns):
        raise _nothing_left(columns, taken, model)
    return (
        dataset.remove_columns(list(unused_columns)) if unused_columns else dataset
    ), unused_columns


def _nothing_left(columns: Any, taken: frozenset[str], model: str) -> ConfigError:
    return ConfigError(
        f"no column of the dataset ({', '.join(columns)}) is one that the forward of `{model}` "
        f"takes ({', '.join(sorted(taken))}): rename them, or set `remove_unused_columns` to False"
    )


def collator_for(processing: Any) -> Callable[[Any], Any]:
    """Return the default collator: padding with a tokenizer, else stacking."""
    if not hasattr(processing, "pad"):
        return default_data_collator
    from transformers import DataCollatorWithPadding

    collator: Callable[[Any], Any] = DataCollatorWithPadding(processing)
    return collator


def default_data_collator(features: Sequence[Any]) -> Any:
    """Stack samples into a batch.

    Mappings become a dict: ``label`` (a number) and ``label_ids`` (a sequence) are renamed to
    ``labels``; strings and None are left out, as in Transformers. Tuples and tensors are stacked
    by torch's own rule.
    """
    if not isinstance(features[0], Mapping):
        return default_collate(list(features))
    batch: dict[str, Any] = {}
    for name, first_value in features[0].items():
        if first_value is None or isinstance(first_value, str):
            continue
        column = [feature[name] for feature in features]
        if name in {"label", "label_ids"}:
            batch["labels"] = _stack_labels(column)
        else:
            batch[name] = _stack(column)
    return batch


def _stack(column: list[Any]) -> torch.Tensor:
    if isinstance(column[0], torch.Tensor):
        return torch.stack(column)
    if isinstance(column[0], np.ndarray):
        return torch.from_numpy(np.stack(column))
    return torch.tensor(column)


def _stack_labels(column: list[Any]) -> torch.Tensor:
    """Stack labels: whole numbers become int64, others float32, as losses expect."""
    stacked = _stack(column)
    return stacked.float() if stacked.is_floating_point() else stacked.long()
