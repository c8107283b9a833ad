"""Tensors of a safetensors file, copied out of it."""

from __future__ import annotations

import math
from typing import Any

import torch

from resilient.errors import IntegrityError
from resilient.format.dtypes import ITEM_BYTES
from resilient.format.shard import read_header
from resilient.state.dtypes import TORCH_DTYPES


def unpack(data: bytes, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU.

    Args:
        data: the whole file.
        key: its name, for errors.

    Raises:
        IntegrityError: it is cut short, or its header is not that of such a file.
    """
    header, begin = read_header(data, key)
    header.pop("__metadata__", None)
    held = memoryview(bytearray(data))[begin:]
    try:
        _require_whole(held, header)
        return {name: _tensor(held, slot) for name, slot in header.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise IntegrityError(
            f"`{key}` is no whole safetensors file: {error}",
            key=key,
            hint="take another checkpoint",
        ) from error


def _require_whole(held: memoryview, header: dict[str, Any]) -> None:
    end = max((slot["data_offsets"][1] for slot in header.values()), default=0)
    if end != len(held):
        raise ValueError(f"its header speaks of {end} bytes, and it has {len(held)}")


def _tensor(held: memoryview, slot: dict[str, Any]) -> torch.Tensor:
    dtype, shape = slot["dtype"], slot["shape"]
    start, end = slot["data_offsets"]
    if end - start != math.prod(shape) * ITEM_BYTES[dtype] or not 0 <= start <= end:
        raise ValueError(f"{end - start} bytes are no {dtype} of shape {shape}")
    if start == end:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    # A copy lies where torch would have put it, whatever the file's offset.
    return torch.frombuffer(held[start:end], dtype=TORCH_DTYPES[dtype]).view(shape).clone()
