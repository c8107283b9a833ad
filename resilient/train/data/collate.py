"""Samples -> a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

if TYPE_CHECKING:
    from collections.abc import Callable


def collator_for(processing: Any) -> Callable[[Any], Any]:
    """Return what makes batches unless the user says: a tokenizer pads, else they are stacked."""
    if not hasattr(processing, "pad"):
        return default_data_collator
    from transformers import DataCollatorWithPadding

    collator: Callable[[Any], Any] = DataCollatorWithPadding(processing)
    return collator


def default_data_collator(features: Sequence[Any]) -> Any:
    """Stack samples into a batch.

    Mappings become a dict: ``label`` (a number) and ``label_ids`` (a sequence) are renamed to
    ``labels``, strings and None are left out, as in Transformers. Tuples and tensors are stacked
    by torch's own rule.
    """
    if not isinstance(features[0], Mapping):
        return default_collate(list(features))
    batch: dict[str, Any] = {}
    for name, first in features[0].items():
        if first is None or isinstance(first, str):
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
    """Whole numbers become int64, everything else float32: what losses expect."""
    stacked = _stack(column)
    return stacked.float() if stacked.is_floating_point() else stacked.long()
