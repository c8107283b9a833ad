"""Export of the tensors of any checkpoint as safetensors files, streamed block by block."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from resilient.diff.tensor_names import bare
from resilient.diff.tensor_stats import blocks
from resilient.layouts.model import ITEM_BITS, MODEL, OPTIMIZER, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from resilient.diff.model import CheckpointView
    from resilient.layouts.model import Tensor

PARTS = (MODEL, OPTIMIZER)
_ALIGNED = 8
_JOINS = "dcp"


def write_parts(
    side: CheckpointView, folder: Path, on_progress: Callable[[int, int], None]
) -> dict[str, Path]:
    """Write ``model.safetensors``, and ``optimizer.safetensors`` if there are moments.

    The files contain whole tensors.

    Crash: the files are incomplete. The caller gives the folder its final name after this function
        returns.

    Args:
        side: The checkpoint, whose bytes are verified.
        folder: An existing, empty folder.
        on_progress: Function called with the bytes written and the total bytes.

    Returns:
        The file of each part.

    Raises:
        Unreadable: A tensor has a dtype that safetensors lacks, or cannot be read.
        StoreError: A file could not be read.
    """
    tensors_by_part = {part: _tensors_of_part(side, part) for part in PARTS}
    total_bytes = sum(
        value.size_bytes
        for part_tensors in tensors_by_part.values()
        for value in part_tensors.values()
    )
    written_bytes = 0
    path_by_part = {}
    for part, tensors in tensors_by_part.items():
        if not tensors:
            continue
        path = folder / f"{part}.safetensors"
        with path.open("xb") as file:
            file.write(_head(side, tensors))
            for tensor in tensors.values():
                for block in blocks(side, tensor, lambda _done, _of: None):
                    file.write(block.tobytes())
                    written_bytes += block.nbytes
                    on_progress(written_bytes, total_bytes)
        path_by_part[part] = path
    return path_by_part


def _tensors_of_part(side: CheckpointView, part: str) -> dict[str, Tensor]:
    """Return the tensors of a part by name; if two have the same name, the first.

    The result has the names of the module. The function removes prefixes of wrappers. It also
    removes the key under which a script passed its state to torch's DCP, which prefixes each name
    with this key.
    """
    tensor_by_name: dict[str, Tensor] = {}
    tensors = [tensor for tensor in side.tensors if tensor.part == part]
    key = f"{part}."
    is_joined = side.layout == _JOINS and all(tensor.name.startswith(key) for tensor in tensors)
    for tensor in tensors:
        if ITEM_BITS.get(tensor.dtype, 1) % 8:
            raise Unreadable(
                f"`{tensor.name}` is of {tensor.dtype}, which is not a whole number of bytes"
            )
        name = bare(tensor.name)
        tensor_by_name.setdefault(name.removeprefix(key) if is_joined else name, tensor)
    return tensor_by_name


def _head(side: CheckpointView, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header: length u64, then JSON, padded with spaces to 8 bytes.

    Source: https://github.com/huggingface/safetensors.
    """
    metadata = {"format": "pt"} if side.step is None else {"format": "pt", "step": str(side.step)}
    fields: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.size_bytes
        fields[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
