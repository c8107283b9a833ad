"""Whether an index of weights in shards says what the shards hold (pure).

Source: ``transformers.trainer_utils.load_sharded_checkpoint``: it loads each file that the index
names, whole and in the order of their names, so of a name that is in two the last one stays.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from resilient.layouts.values import Cure, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from resilient.layouts.values import Tensor

STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
SHARD = re.compile(rf"(({'|'.join(STEMS)})-)(\d{{5}})-of-(\d{{5}})(\.safetensors|\.bin)")
STALE = "it is of shards, and nothing reads it: the weights are in one file"
ORPHAN = "a shard that no index names, so nothing reads it"
_REPAIR = "resilient ckpt repair {path}"
_MAP = "its `weight_map`"


def shards_in(names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """Return the files that look like shards, by the index that would name them."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        match = SHARD.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match:
            found.setdefault(f"{prefix}{match[2]}{match[5]}.index.json", []).append(name)
    return found


def unnamed(index: str, count: int) -> Problem:
    """Return what it means that shards have no index."""
    what = f"it is missing, and its tool finds the {count} shards by it alone"
    return Problem(index, what, is_fatal=True, help=_REPAIR)


def doubled(tensors: Sequence[Tensor]) -> list[Problem]:
    """Return the first tensor that is in two files."""
    held: dict[str, Tensor] = {}
    for one in tensors:
        other = held.setdefault(one.name, one)
        if other is not one and other.files != one.files:
            what = (
                f"`{one.name[:80]}` is in `{other.files[0][:80]}` as well, and which of both is "
                "right does not show"
            )
            return [Problem(one.files[0], what, is_fatal=True, cure=Cure.COPY)]
    return []


def contradictions(
    index: str, document: Mapping[str, Any], prefix: str, tensors: Sequence[Tensor]
) -> list[Problem]:
    """Return what an index says that its shards do not; no resume stops at it.

    Args:
        index: its name.
        document: what is in it.
        prefix: the folder it is in, with a ``/`` at its end.
        tensors: of all its shards.
    """
    mapped = document["weight_map"]
    lacking = [one.name for one in tensors if one.name not in mapped]
    elsewhere = [
        one.name
        for one in tensors
        if one.name in mapped and f"{prefix}{mapped[one.name]}" not in one.files
    ]
    found = []
    if lacking:
        found.append(
            f"{_MAP} lacks {len(lacking)} of their tensors, `{lacking[0][:80]}` among them"
        )
    if elsewhere:
        found.append(f"{_MAP} names another shard for `{elsewhere[0][:80]}` than has it")
    metadata = document.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(one.size_bytes for one in tensors)
    if isinstance(said, int | float) and said != total:
        found.append(f"its `total_size` is {said}, and the shards have {total} bytes of tensors")
    return [Problem(index, one, help=_REPAIR) for one in found]
