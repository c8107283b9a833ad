"""Whether a manifest that was read makes sense: names, places, sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from resilient.format.digest import CHUNK_BYTES, join_chunks
from resilient.format.dtypes import ITEM_BYTES
from resilient.format.names import is_file_name, origin_of
from resilient.format.parity import check_groups
from resilient.format.regions import covers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.format.manifest import Manifest, TensorEntry


def check(manifest: Manifest, chunk_bytes: int) -> None:
    """Refuse what contradicts itself, so that nothing that reads a manifest has to doubt it.

    Args:
        manifest: as it was decoded.
        chunk_bytes: the length of chunks that it states.

    Raises:
        ValueError: names climb, offsets leave files, or tensors have holes.
        KeyError: a region lies in a file that is not listed.
    """
    _require(chunk_bytes == CHUNK_BYTES, f"chunks of {chunk_bytes} bytes")
    sizes: dict[str, int] = {}
    for entry in manifest.files:
        _require(_may_be_listed(entry.name, manifest), f"file name {entry.name!r}")
        _require(entry.name not in sizes, f"`{entry.name}` is listed twice")
        _require(join_chunks(entry.chunks) == entry.digest, f"digests of `{entry.name}`")
        _require(
            -(-entry.size_bytes // CHUNK_BYTES) == len(entry.chunks), f"chunks of {entry.name}"
        )
        sizes[entry.name] = entry.size_bytes
    _require(len({one.name for one in manifest.tensors}) == len(manifest.tensors), "tensor names")
    for tensor in manifest.tensors:
        _check_tensor(tensor, sizes)
    for part in manifest.parts:
        _require(
            part.document in sizes and is_file_name(part.document), f"document of `{part.name}`"
        )
    _require(isinstance(manifest.metrics, dict), "metrics")
    for name, value in manifest.metrics.items():
        _require(type(value) in (int, float) and math.isfinite(value), f"metric `{name}`")
    _require(manifest.format_version > 1 or not manifest.parity, "parity before version 2")
    check_groups(manifest.parity, sizes)


def _may_be_listed(name: str, manifest: Manifest) -> bool:
    """Say whether it names a file of our own or, since version 2, of an older checkpoint.

    Never of a newer one: so references cannot run in a ring, and rotation knows how far the
    needs of a manifest that it cannot read may reach.
    """
    origin = origin_of(name)
    if origin is None:
        return is_file_name(name)
    return manifest.format_version > 1 and origin < manifest.checkpoint


def _check_tensor(tensor: TensorEntry, sizes: Mapping[str, int]) -> None:
    _require(
        covers(tensor.shape, [one.region for one in tensor.regions]), f"holes in {tensor.name}"
    )
    for one in tensor.regions:
        _require(
            one.size_bytes == one.region.size * ITEM_BYTES[tensor.dtype]
            and 0 <= one.start <= one.start + one.size_bytes <= sizes[one.file],
            f"place of {tensor.name}{one.region}",
        )


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(what)
