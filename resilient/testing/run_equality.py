"""Bitwise comparison of the final checkpoints of two runs, as a test of correctness.

::

    store, other = open_store("runs/calm"), open_store("runs/struck")
    assert not differences(ending(store), ending(other))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from resilient.checkpoint.refs import resolve
from resilient.checkpoint.restore.read import read
from resilient.state_dict.load import load
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
    proved = read(store, resolve(store, ref))
    names = [
        part.name
        for part in proved.manifest.parts
        if part.name not in NOT_COMPARED and (with_own or part.scope != "rank")
    ]
    states = {name: AnyState() for name in names}
    parts = {name: Part(value) for name, value in states.items()}
    load(proved.manifest, proved.files, parts, 0)
    step = proved.manifest.checkpoint.step
    return {"step": step} | {name: value.state for name, value in states.items()}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the places where two values differ in type, shape or a single bit; empty if equal.

    Args:
        one: Nested dicts, lists and tuples of tensors and plain values.
        other: Value to compare with.
        path: Path of the values in a larger value; it begins each line.
    """
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        found = [] if list(one) == list(other) else [f"{path}: keys {list(one)} and {list(other)}"]
        shared = [key for key in one if key in other]
        return found + [
            line for key in shared for line in differences(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}/{index}")]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)
    else:
        same = repr(one) == repr(other)
    return [] if same else [f"{path}: {one!r:.80} and {other!r:.80}"]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape have the same bits, NaNs included."""
    plain = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*plain)
