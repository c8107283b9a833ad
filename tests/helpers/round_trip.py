"""Compare two states to the bit, types included."""

from __future__ import annotations

import numpy as np
import torch


def require_same_state(saved, found, path="state"):
    """Raise AssertionError, with the path of the first difference."""
    assert type(saved) is type(found), f"{path}: {type(saved)} became {type(found)}"
    if isinstance(saved, torch.Tensor):
        assert (saved.dtype, saved.shape) == (found.dtype, found.shape), path
        saved, found = (
            one.detach().resolve_conj().resolve_neg().contiguous().cpu() for one in (saved, found)
        )
        same = [one.reshape(-1).view(torch.uint8).tolist() for one in (saved, found)]
        assert same[0] == same[1], f"{path}: the bits differ"
    elif isinstance(saved, np.ndarray | np.generic):
        assert (saved.dtype, saved.shape) == (found.dtype, found.shape), path
        assert saved.tobytes() == found.tobytes(), f"{path}: the bits differ"
    elif isinstance(saved, dict):
        assert [*map(repr, saved)] == [*map(repr, found)], f"{path}: keys {[*saved]}, {[*found]}"
        for key, one, other in zip(saved, saved.values(), found.values(), strict=True):
            require_same_state(one, other, f"{path}/{key}")
    elif isinstance(saved, list | tuple):
        assert len(saved) == len(found), path
        for at, (one, other) in enumerate(zip(saved, found, strict=True)):
            require_same_state(one, other, f"{path}/{at}")
    else:
        same = repr(saved) == repr(found) if isinstance(saved, float | complex) else saved == found
        assert same, f"{path}: {saved!r} became {found!r}"
