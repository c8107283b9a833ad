"""Two runs, held against each other bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from resilient.state.capture import Part
from resilient.state.load import load
from resilient.vault.catalog import committed
from resilient.vault.read import read

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.store import Store


class Held:
    """Takes any state and holds it."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return what is held."""
        return self.state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold a state."""
        self.state = state_dict


def ending(store: Store) -> dict[str, Any]:
    """Return the state of every part of the newest checkpoint, every byte proved."""
    proved = read(store, committed(store)[0])
    parts = {one.name: Part(Held()) for one in proved.manifest.parts}
    load(proved.manifest, proved.files, parts, 0)
    return {name: part.stateful.state_dict() for name, part in parts.items()}


def compare(one: Store, other: Store) -> dict[str, bool]:
    """Return whether each aspect of two runs is the same in every bit."""
    a, b = ending(one), ending(other)
    ranks = sorted(name for name in a if name.startswith(("samples_", "rng_state_")))
    aspects = {
        "weights": ["model"],
        "optimizer": ["optimizer", "scheduler"],
        "sample order": [name for name in ranks if name.startswith("samples_")],
        "random state": [name for name in ranks if name.startswith("rng_state_")],
    }
    verdict = {
        aspect: bool(names) and all(same(a[name], b.get(name)) for name in names)
        for aspect, names in aspects.items()
    }
    histories = [state["trainer_state"]["log_history"] for state in (a, b)]
    return {**verdict, "loss history": bool(histories[0]) and same(*histories)}


def same(one: Any, other: Any) -> bool:
    """Say whether two values are equal in type, shape and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)
    return repr(one) == repr(other)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
