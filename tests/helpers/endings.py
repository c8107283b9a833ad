"""What a run ended with, for comparing runs by equality."""

from __future__ import annotations

import torch
from manifests import Values

from resilient.state.capture import Part
from resilient.state.load import load
from resilient.storage.open import open_store
from resilient.vault.catalog import resolve
from resilient.vault.read import read

# Names the life that saved the best model, which two equal runs may differ in.
NOT_COMPARED = {"best"}


def ending(url: str, ref: str = "latest") -> dict[str, object]:
    """Return every part of a checkpoint, the ranks' own ones by their stored names."""
    store = open_store(str(url))
    proved = read(store, resolve(store, ref))
    names = [one.name for one in proved.manifest.parts if one.name not in NOT_COMPARED]
    parts = {name: Part(Values()) for name in names}
    load(proved.manifest, proved.files, parts, 0)
    return {"step": proved.manifest.checkpoint.step} | {
        name: part.stateful.state for name, part in parts.items()
    }


def differences(one, other, path: str = "") -> list[str]:
    """Return where two values differ in a single bit."""
    if type(one) is not type(other):
        return [f"{path}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        found = [f"{path}: keys {set(one) ^ set(other)}"] if set(one) != set(other) else []
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
    """Say whether two tensors of one dtype and shape hold the same bits, NaNs included."""
    plain = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*plain)
