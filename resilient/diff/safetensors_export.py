"""The tensors of any checkpoint as files of safetensors, streamed: none of them is ever held."""

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
    side: CheckpointView, folder: Path, told: Callable[[int, int], None]
) -> dict[str, Path]:
    """Write ``model.safetensors``, and ``optimizer.safetensors`` if there are moments.

    A tensor that lies in pieces, whatever cut it, is whole in the file, under its name.

    Crash: the files are short; the folder is the caller's to give a name when they are done.

    Args:
        side: the checkpoint; its bytes were proved.
        folder: is there, and empty.
        told: called with bytes written and bytes in all.

    Returns:
        The file of each part.

    Raises:
        Unreadable: a tensor is of a kind that safetensors has not, or cannot be read.
        StoreError: it could not be read.
    """
    chosen = {part: _of_part(side, part) for part in PARTS}
    of_bytes = sum(one.size_bytes for some in chosen.values() for one in some.values())
    done = 0
    written = {}
    for part, tensors in chosen.items():
        if not tensors:
            continue
        path = folder / f"{part}.safetensors"
        with path.open("xb") as file:
            file.write(_head(side, tensors))
            for tensor in tensors.values():
                for block in blocks(side, tensor, lambda _done, _of: None):
                    file.write(block.tobytes())
                    done += block.nbytes
                    told(done, of_bytes)
        written[part] = path
    return written


def _of_part(side: CheckpointView, part: str) -> dict[str, Tensor]:
    """Return the tensors of a part by name; of one that stands there twice the first.

    Names are those of the module: without what wraps it, and without the key under which a script
    gave its state to torch's DCP, which joins both.
    """
    found: dict[str, Tensor] = {}
    chosen = [one for one in side.tensors if one.part == part]
    key = f"{part}."
    is_joined = side.layout == _JOINS and all(one.name.startswith(key) for one in chosen)
    for one in chosen:
        if ITEM_BITS.get(one.dtype, 1) % 8:
            raise Unreadable(f"`{one.name}` is of {one.dtype}, which is no whole bytes")
        name = bare(one.name)
        found.setdefault(name.removeprefix(key) if is_joined else name, one)
    return found


def _head(side: CheckpointView, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the header: length u64, then JSON, padded with spaces to eight bytes.

    Source: the format's own page, https://github.com/huggingface/safetensors.
    """
    metadata = {"format": "pt"} if side.step is None else {"format": "pt", "step": str(side.step)}
    fields: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, one in tensors.items():
        end = at + one.size_bytes
        fields[name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text
