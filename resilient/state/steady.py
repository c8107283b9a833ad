"""Which memory training leaves alone between two optimizer steps."""

from __future__ import annotations

from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from resilient.state.optimizer import NamedOptimizer
from resilient.state.tree import PLAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.state.capture import Part


_KINDS = frozenset(PLAIN)
_values_of = methodcaller("values")


def steady_memory(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that only an optimizer's step changes.

    These are the parameters that an optimizer among the parts holds, and its state. A forward
    pass may change everything else: buffers such as BatchNorm's, random state, parameters that
    no optimizer of this save holds. A part may say itself what it holds, by a method ``steady()``
    that yields tensors.
    """
    held = [one for part in parts.values() for one in _steady(part.stateful)]
    if _KINDS.issuperset(map(type, held)) and not any(map(torch.Tensor.storage_offset, held)):
        # Each begins where its storage does; to ask a tensor for its storage takes longer.
        return frozenset(map(torch.Tensor.data_ptr, held))
    return frozenset(map(address_of, held))


def _steady(stateful: Any) -> Iterable[torch.Tensor]:
    if hasattr(stateful, "steady"):
        return stateful.steady()  # type: ignore[no-any-return]  # what a Stateful of anyone returns
    optimizer = stateful.optimizer if isinstance(stateful, NamedOptimizer) else stateful
    return _held(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else ()


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage that a tensor lies in on this rank; 0 is nowhere."""
    if type(tensor) in PLAIN:
        return tensor.untyped_storage().data_ptr()
    # Only sharded training pays for loading torch's part about it.
    from resilient.state.placement import is_sharded, local_memory

    return local_memory(tensor).untyped_storage().data_ptr() if is_sharded(tensor) else 0


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [one for group in optimizer.param_groups for one in group["params"]]
    values = [*chain.from_iterable(map(_values_of, optimizer.state.values()))]
    if not _KINDS.issuperset(map(type, values)):
        values = [one for one in values if isinstance(one, torch.Tensor)]
    return held + values
