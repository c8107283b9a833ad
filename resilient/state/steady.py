"""Which memory training leaves alone between two optimizer steps."""

from __future__ import annotations

from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch

from resilient.state.optimizer import NamedOptimizer
from resilient.state.recall import Kept
from resilient.state.tree import PLAIN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from resilient.state.capture import Part, Snapshot


# Below this, to copy takes less time than to keep books of what is not copied yet; and some models
# clamp a small parameter of theirs in a forward pass.
_LATER_BYTES_MIN = 64 << 10
_KINDS = frozenset(PLAIN)
_DICTS = frozenset({dict})
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
    keeps a number of its own within bounds changes it all the same; what an optimizer keeps may
    be the memory of a parameter.
    """
    found = [*filter(None, (_optimizer_of(part.stateful) for part in parts.values()))]
    kept = _addresses(one for optimizer in found for one in _kept(optimizer))
    return kept - _addresses(one for optimizer in found for one in _parameters(optimizer))


class Steadiness:
    """Knows what is steady as long as optimizers keep the memory that they had.

    To go through all that they keep takes as long, at each step, as to copy a part of it.
    """

    def __init__(self) -> None:
        self._layout: list[Any] = []
        self._alive: list[Any] = []
        self._found = frozenset[int](), frozenset[int]()

    def of(
        self, parts: Mapping[str, Part], snapshot: Snapshot
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Return what :func:`steady_memory` and :func:`state_memory` do.

        Args:
            parts: by name.
            snapshot: of these parts, just now.
        """
        pairs = [*zip(parts.values(), (one.tensors for one in snapshot.parts), strict=True)]
        layout = [_layout_of(part.stateful, tensors) for part, tensors in pairs]
        if None in layout or layout != self._layout:
            self._found = steady_memory(parts), state_memory(parts)
            # An object is known by its number only while it lives.
            self._layout, self._alive = layout, [tensors for _, tensors in pairs]
        return self._found


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
    if _says_itself(stateful):
        return stateful.steady()  # type: ignore[no-any-return]  # what a Stateful of anyone returns
    optimizer = _optimizer_of(stateful)
    return _held(optimizer) if optimizer is not None else ()


def _says_itself(stateful: Any) -> bool:
    # What somebody's module or optimizer has by that name is something else.
    is_torchs = isinstance(stateful, torch.nn.Module | torch.optim.Optimizer)
    return not is_torchs and callable(getattr(type(stateful), "steady", None))


def _layout_of(stateful: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...] | None:
    """Return where the memory of an optimizer lies; None if that is not known so.

    Args:
        stateful: any.
        tensors: what it said just now.
    """
    if _says_itself(stateful):
        return None
    optimizer = _optimizer_of(stateful)
    if optimizer is None:
        return ()
    held = _parameters(optimizer)
    if not isinstance(tensors, Kept) or not _KINDS.issuperset(map(type, held)):
        return None
    return id(tensors), [*map(torch.Tensor.data_ptr, chain(held, tensors.values()))]


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
    return _parameters(optimizer) + _kept(optimizer)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _kept(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [*optimizer.state.values()]
    # Mostly a dict for each parameter; torch takes and restores anything else as well.
    dicts = states if _DICTS.issuperset(map(type, states)) else [*map(_dict_of, states)]
    values = [*chain.from_iterable(map(_values_of, dicts))]
    if _KINDS.issuperset(map(type, values)):
        return values
    return [one for one in values if isinstance(one, torch.Tensor)]


def _dict_of(state: Any) -> dict[Any, Any]:
    return state if isinstance(state, dict) else {"": state}
