"""Gather operations over ranks: rows of tensors, or any picklable objects.

Model outputs are nested: tensors in tuples, lists and mappings. A list without tensors has one
value per sample, for example a decoded text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Filler of rows shorter than the longest; losses and metrics ignore it (Transformers).
PADDING = -100


def nested(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return ``value`` with ``change`` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: nested(change, item) for name, item in value.items()}
    if is_column(value):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(nested(change, item) for item in value)
    return value


def is_column(value: Any) -> bool:
    """Return whether ``value`` is a list with one plain value per sample, not a structure."""
    return isinstance(value, list) and not any(
        isinstance(item, (torch.Tensor, np.ndarray, Mapping, tuple)) for item in value
    )


def first_of(value: Any) -> Any:
    """Return the first leaf of a nested value."""
    while isinstance(value, (Mapping, tuple)):
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return value


def zipped(batches: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Return the common structure of ``batches``, with ``join`` applied to corresponding leaves.

    The result is None where the first batch has None.
    """
    first_batch = batches[0] if batches else None
    if first_batch is None:
        return None
    if isinstance(first_batch, Mapping):
        return {name: zipped([batch[name] for batch in batches], join) for name in first_batch}
    if isinstance(first_batch, (list, tuple)) and not is_column(first_batch):
        return tuple(zipped(list(place), join) for place in zip(*batches, strict=True))
    return join(batches)


def to_numpy(rows: torch.Tensor) -> Any:
    """Return a tensor as an array; half precision becomes float32 for accurate sums in NumPy."""
    rows = rows.detach().cpu()
    half = rows.dtype in {torch.bfloat16, torch.float16}
    return (rows.float() if half else rows).numpy()


def pad_to(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return ``rows`` enlarged to ``shape`` at the ends, filled with -100."""
    if list(rows.shape) == list(shape):
        return rows
    padded = rows.new_full(tuple(shape), PADDING)
    padded[tuple(slice(0, length) for length in rows.shape)] = rows
    return padded


def pad_and_concatenate(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join tensors along the samples; other dimensions are padded to the largest size.

    Raises:
        ConfigError: A tensor has no dimension of samples.
    """
    if not all(batch.dim() for batch in batches):
        raise ConfigError(
            "the model returned a number, but evaluation needs one row per sample: name that "
            "output in `ignore_keys` of `evaluate` and `predict`, or in `ignore_keys_for_eval` of "
            "`train`, or return it per sample"
        )
    padded_lengths = [
        max(lengths) for lengths in zip(*(batch.shape[1:] for batch in batches), strict=True)
    ]
    return torch.cat([pad_to(batch, [len(batch), *padded_lengths]) for batch in batches])


def concatenate(batches: Sequence[Any]) -> Any:
    """Join the leaves of this rank's batches: arrays are padded, lists are chained."""
    if isinstance(batches[0], np.ndarray):
        return pad_and_concatenate([torch.from_numpy(batch) for batch in batches]).numpy()
    return [value for batch in batches for value in batch]


def gather_rows(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return the rows of all ranks, in rank order; their numbers may differ. Collective.

    Args:
        rows: Rows of this rank.
        ranks: Number of ranks with separate rows. If there are more ranks, neighbouring ranks have
            the same rows, and these rows are used once.
    """
    if ranks == 1:
        return rows
    shape = torch.tensor(rows.shape, device=rows.device)
    rank_count = dist.get_world_size()
    shapes = [torch.empty_like(shape) for _ in range(rank_count)]
    dist.all_gather(shapes, shape)
    largest = torch.stack(shapes).amax(0).tolist()
    own_rows = pad_to(rows, largest).contiguous()
    gathered_rows = [torch.empty_like(own_rows) for _ in range(rank_count)]
    dist.all_gather(gathered_rows, own_rows)
    cut = [item[: int(shape[0])] for item, shape in zip(gathered_rows, shapes, strict=True)]
    return torch.cat(cut[:: rank_count // ranks])


def gather_objects(value: Any, ranks: int) -> list[Any]:
    """Return each rank's object, in rank order. Collective.

    Only for ranks of one job: the received bytes are unpickled.
    """
    if ranks == 1:
        return [value]
    gathered_objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered_objects, value)
    return gathered_objects[:: len(gathered_objects) // ranks]
