"""Which memory training leaves alone between two optimizer steps."""

from __future__ import annotations

from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from resilient.state.optimizer import NamedOptimizer
from resilient.state.tree import PLAIN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from resilient.state.capture import Part


# Below this, to copy takes less time than to keep books of what is not copied yet; and some models
# clamp a small parameter of theirs in a forward pass.
_LATER_BYTES_MIN = 64 << 10
_KINDS = frozenset(PLAIN)
_values_of = methodcaller("values")


def steady_memory(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that only an optimizer's step changes.

    These are the parameters that an optimizer among the parts holds, and its state. A forward
    pass may change everything else: buffers such as BatchNorm's, random state, parameters that
    no optimizer of this save holds. A part may say itself what it holds, by a method ``steady()``
    that yields tensors.
    """
    return _addresses(one for part in parts.values() for one in _steady(part.stateful))


def state_memory(parts: Mapping[str, Part]) -> frozenset[int]:
    """Return the addresses of storages that hold the state of torch's optimizers, and nothing else.

    No model's forward pass knows them. Parameters may be among what is steady, and a model that
    keeps a number of its own within bounds changes it all the same.
    """
    found = filter(None, (_optimizer_of(part.stateful) for part in parts.values()))
    return _addresses(one for optimizer in found for one in _kept(optimizer))


def may_wait(
    source: torch.Tensor, steady: Collection[int], small: Collection[int] = frozenset()
) -> bool:
    """Say whether a tensor is better copied beside training.

    Args:
        source: to copy.
        steady: addresses of storages that nobody changes for a while.
        small: addresses of those that wait however small a tensor in them is.
    """
    address = address_of(source)
    return address in steady and (source.nbytes >= _LATER_BYTES_MIN or address in small)


def _addresses(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    held = [*tensors]
    if _KINDS.issuperset(map(type, held)) and not any(map(torch.Tensor.storage_offset, held)):
        # Each begins where its storage does; to ask a tensor for its storage takes longer.
        return frozenset(map(torch.Tensor.data_ptr, held))
    return frozenset(map(address_of, held))


def _steady(stateful: Any) -> Iterable[torch.Tensor]:
    if hasattr(stateful, "steady"):
        return stateful.steady()  # type: ignore[no-any-return]  # what a Stateful of anyone returns
    optimizer = _optimizer_of(stateful)
    return _held(optimizer) if optimizer is not None else ()


def _optimizer_of(stateful: Any) -> torch.optim.Optimizer | None:
    one = stateful.optimizer if isinstance(stateful, NamedOptimizer) else stateful
    return one if isinstance(one, torch.optim.Optimizer) else None


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the storage that a tensor lies in on this rank; 0 is nowhere."""
    if type(tensor) in PLAIN:
        return tensor.untyped_storage().data_ptr()
    # Only sharded training pays for loading torch's part about it.
    from resilient.state.placement import is_sharded, local_memory

    return local_memory(tensor).untyped_storage().data_ptr() if is_sharded(tensor) else 0


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    held = [one for group in optimizer.param_groups for one in group["params"]]
    return held + _kept(optimizer)


def _kept(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    values = [*chain.from_iterable(map(_values_of, optimizer.state.values()))]
    if _KINDS.issuperset(map(type, values)):
        return values
    return [one for one in values if isinstance(one, torch.Tensor)]
