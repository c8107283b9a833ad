"""Bitwise comparison of the final checkpoints of two runs, as a test of correctness.

``ending`` returns the state in the last checkpoint of a run. ``differences`` returns the places
where two states differ.

::

    store, other = open_store("runs/calm"), open_store("runs/struck")
    assert not differences(ending(store), ending(other))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from resilient.checkpoint.refs import resolve
from resilient.checkpoint.restore.read import read
from resilient.state_dict.resharding import load
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.store import Store

# This part names the attempt that saved the best model, which may differ in equal runs.
NOT_COMPARED = frozenset({"best"})


class AnyState:
    """Stateful that accepts and keeps any state."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""
        state: Mapping[str, Any] = self.state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the state."""
        self.state = state_dict


def ending(store: Store, ref: str = "latest", *, with_own: bool = True) -> dict[str, Any]:
    """Return the state of every part of a checkpoint by stored name, and its ``step``.

    Every byte is verified. Parts that belong to one rank have their stored names.

    Crash: reads only.

    Args:
        store: Store of the repository.
        ref: Reference of the checkpoint.
        with_own: Whether to include parts that belong to one rank.

    Raises:
        IntegrityError: The checkpoint is damaged.
        KeyNotFound: The checkpoint does not exist.
    """
    verified = read(store, resolve(store, ref))
    names = [
        part.name
        for part in verified.manifest.parts
        if part.name not in NOT_COMPARED and (with_own or part.scope != "rank")
    ]
    states = {name: AnyState() for name in names}
    parts = {name: Part(value) for name, value in states.items()}
    load(verified.manifest, verified.files, parts, 0)
    step = verified.manifest.checkpoint.step
    return {"step": step} | {name: value.state for name, value in states.items()}


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Return the places where two values differ in type, shape or a single bit; empty if equal.

    Args:
        left: Nested dicts, lists and tuples of tensors and plain values.
        right: Value to compare with.
        path: Prefix of each line of the result: the path of the values inside a larger value.
    """
    if type(left) is not type(right):
        return [f"{path}: {type(left).__name__} and {type(right).__name__}"]
    if isinstance(left, dict):
        problems = (
            [] if list(left) == list(right) else [f"{path}: keys {list(left)} and {list(right)}"]
        )
        shared = [key for key in left if key in right]
        return problems + [
            line for key in shared for line in differences(left[key], right[key], f"{path}/{key}")
        ]
    if isinstance(left, list | tuple):
        if len(left) != len(right):
            return [f"{path}: {len(left)} and {len(right)} items"]
        pairs = enumerate(zip(left, right, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}/{index}")]
    if isinstance(left, torch.Tensor):
        is_equal = (
            left.dtype == right.dtype and left.shape == right.shape and same_bits(left, right)
        )
    else:
        is_equal = repr(left) == repr(right)
    return [] if is_equal else [f"{path}: {left!r:.80} and {right!r:.80}"]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits, NaNs included."""
    plain = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*plain)
