"""Files of torch, their checksums verified, read as data alone.

``torch.load(weights_only=True)`` loads them. It also takes a few classes that are named here:
random states of NumPy, and stand-ins for classes of DeepSpeed, which keep attributes alone.
"""

from __future__ import annotations

import codecs
import pickle
import warnings
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from resilient.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPOILED = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError)


class StandIn:
    """An object of a class that is not loaded: what it was made of, and nothing that it does."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes."""
        self.state = state


_DEEPSPEED = (
    *("runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler"),
    *("utils.tensor_fragment.fragment_address", "runtime.zero.config.ZeroStageEnum"),
)
# What a random state of NumPy is pickled with, and what DeepSpeed puts beside its tensors.
_TAKEN: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]  # noqa: SLF001 - its pickled name
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    codecs.encode,
    *((StandIn, f"deepspeed.{name}") for name in _DEEPSPEED),
]


def load_torch(source: BinaryIO, key: str) -> Any:
    """Load a file of torch as data, its checksums verified.

    A file of torch before 1.6 is no zip and has no checksums.

    Args:
        source: The open file.
        key: Its name, for errors.

    Raises:
        IntegrityError: It is damaged, or holds what is no data.
    """
    try:
        spoiled = None
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as content:
                spoiled = content.testzip()
        if spoiled is None:
            source.seek(0)
            with torch.serialization.safe_globals(_TAKEN), warnings.catch_warnings():
                # torch tells each reader of an old file about its storages.
                warnings.simplefilter("ignore", UserWarning)
                return torch.load(source, map_location="cpu", weights_only=True)
        trouble = f"the checksum of `{spoiled}` in it is wrong"
    except (*_SPOILED, RuntimeError, ValueError, OSError, LookupError, TypeError) as error:
        trouble = str(error).partition("\n")[0]
    raise IntegrityError(
        f"`{key}` cannot be read: {trouble}", key=key, hint="take another checkpoint"
    )


def nested(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return values by path as dicts; keys of lists are their numbers."""
    whole: dict[Any, Any] = {}
    for path, value in values.items():
        place = whole
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return whole


def with_groups(found: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with lists where numbers are the names."""
    groups = found["param_groups"]
    listed = [groups[number] for number in sorted(groups)]
    return {"state": found.get("state", {}), "param_groups": listed}
