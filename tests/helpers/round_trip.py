"""Compare two states to the bit, types included."""

from __future__ import annotations

import numpy as np
import torch


def require_same_state(saved, loaded, path="state"):
    """Raise AssertionError, with the path of the first difference."""
    assert type(saved) is type(loaded), f"{path}: {type(saved)} became {type(loaded)}"
    if isinstance(saved, torch.Tensor):
        assert (saved.dtype, saved.shape) == (loaded.dtype, loaded.shape), path
        saved, loaded = (
            left.detach().resolve_conj().resolve_neg().contiguous().cpu()
            for left in (saved, loaded)
        )
        is_equal = [left.reshape(-1).view(torch.uint8).tolist() for left in (saved, loaded)]
        assert is_equal[0] == is_equal[1], f"{path}: the bits differ"
    elif isinstance(saved, np.ndarray | np.generic):
        assert (saved.dtype, saved.shape) == (loaded.dtype, loaded.shape), path
        assert saved.tobytes() == loaded.tobytes(), f"{path}: the bits differ"
    elif isinstance(saved, dict):
        assert [*map(repr, saved)] == [*map(repr, loaded)], f"{path}: keys {[*saved]}, {[*loaded]}"
        for key, left, right in zip(saved, saved.values(), loaded.values(), strict=True):
            require_same_state(left, right, f"{path}/{key}")
    elif isinstance(saved, list | tuple):
        assert len(saved) == len(loaded), path
        for at, (left, right) in enumerate(zip(saved, loaded, strict=True)):
            require_same_state(left, right, f"{path}/{at}")
    else:
        is_equal = (
            repr(saved) == repr(loaded) if isinstance(saved, float | complex) else saved == loaded
        )
        assert is_equal, f"{path}: {saved!r} became {loaded!r}"
