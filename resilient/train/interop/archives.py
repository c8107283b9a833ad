"""Files that torch has pickled, proved as far as they can be and read as data alone.

What is loaded is what ``torch.load(weights_only=True)`` takes, besides a few classes that are named
here: random states of NumPy, and plain stand-ins for DeepSpeed's, which only remember. The index of
torch's distributed checkpoints is a bare pickle; of that only the data classes it is made of are
taken, and any other name in it is refused before anything is called.
"""

from __future__ import annotations

import codecs
import io
import pickle
import zipfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from resilient.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SPOILED = (zipfile.BadZipFile, pickle.UnpicklingError)


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
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX = {
    *((_METADATA, name) for name in ("Metadata", "StorageMeta", "MetadataIndex")),
    *((_METADATA, f"{name}StorageMetadata") for name in ("Tensor", "Bytes", "Chunk")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


def load_torch(source: Path | io.BytesIO, key: str) -> Any:
    """Return a file of torch's, its checksums proved, with nothing but data taken from it.

    Args:
        source: the file, or its bytes.
        key: its name, for errors.

    Raises:
        IntegrityError: it is damaged, or holds what is no data.
    """
    try:
        with zipfile.ZipFile(source) as content:
            spoiled = content.testzip()
        if spoiled is None:
            if isinstance(source, io.BytesIO):
                source.seek(0)
            with torch.serialization.safe_globals(_TAKEN):
                return torch.load(source, map_location="cpu", weights_only=True)
        trouble = f"the checksum of `{spoiled}` in it is wrong"
    except FileNotFoundError:
        trouble = "it is missing"
    except (*_SPOILED, RuntimeError, ValueError, EOFError, LookupError) as error:
        trouble = str(error).partition("\n")[0]
    raise IntegrityError(
        f"`{key}` cannot be read: {trouble}", key=key, hint="take another checkpoint"
    )


class _IndexReader(pickle.Unpickler):
    """Takes the classes of an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that only holds data.

        Raises:
            UnpicklingError: it is another.
        """
        if (module, name) == ("pathlib", "PosixPath"):
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _INDEX:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"`{module}.{name}` is no data of an index")


def load_index(file: Path) -> Any:
    """Return the ``Metadata`` of a distributed checkpoint of torch.

    Raises:
        IntegrityError: it is damaged, or holds what is no data.
    """
    try:
        return _IndexReader(io.BytesIO(file.read_bytes())).load()
    except FileNotFoundError:
        trouble = "it is missing"
    except (*_SPOILED, ValueError, EOFError, LookupError, TypeError, AttributeError) as error:
        trouble = str(error).partition("\n")[0]
    raise IntegrityError(
        f"`{file}` cannot be read: {trouble}", key=str(file), hint="take another checkpoint"
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
