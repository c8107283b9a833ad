"""Hold what was written whole against itself: regions, headers, documents and what they name.

Bytes that fit their digests can still be wrong together, by a defect of whoever wrote them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import IntegrityError
from resilient.format.digest import digest_bytes
from resilient.format.dtypes import ITEM_BYTES
from resilient.format.shard import read_header
from resilient.format.trees import tensors_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.format.manifest import FileEntry, Manifest

Problem = tuple[str, str]
"""The tensors hit, empty if none is known, and what is wrong."""


def problems_of(manifest: Manifest, entry: FileEntry, data: bytes) -> list[Problem]:
    """Return everything that does not fit in a file whose bytes are what was committed.

    Args:
        manifest: the table of contents.
        entry: the file.
        data: its content.
    """
    return [
        *_regions(manifest, entry, data),
        *_header(manifest, entry, data),
        *_documents(manifest, entry, data),
    ]


def _regions(manifest: Manifest, entry: FileEntry, data: bytes) -> Iterator[Problem]:
    view = memoryview(data)
    for tensor in manifest.tensors:
        for one in tensor.regions:
            held = view[one.start : one.start + one.size_bytes]
            if one.file == entry.name and digest_bytes(held) != one.digest:
                yield tensor.name, f"its region {one.region} is not what was staged"


def _header(manifest: Manifest, entry: FileEntry, data: bytes) -> Iterator[Problem]:
    """Hold a tensor file's own header against the manifest."""
    if not entry.name.endswith(".safetensors"):
        return
    placed = [
        (tensor.dtype, list(one.region.lengths), one.start, one.start + one.size_bytes)
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == entry.name
    ]
    try:
        header, base = read_header(data, entry.name)
        stated = [
            (one["dtype"], one["shape"], *(base + offset for offset in one["data_offsets"]))
            for name, one in header.items()
            if name != "__metadata__" and one["dtype"] in ITEM_BYTES
        ]
    except (IntegrityError, KeyError, TypeError) as error:
        yield "", f"its header cannot be read ({error})"
        return
    wanted, there = sorted(map(repr, placed)), sorted(map(repr, stated))
    # Of an older checkpoint's file a part may be all that is needed.
    if not set(wanted) <= set(there) if entry.origin else wanted != there:
        yield "", "its header and the manifest disagree"


def _documents(manifest: Manifest, entry: FileEntry, data: bytes) -> Iterator[Problem]:
    """Hold the plain values of each part in this file against the grammar and the tensors."""
    known = {tensor.name for tensor in manifest.tensors}
    for part in manifest.parts:
        if part.document != entry.name:
            continue
        try:
            missing = [name for name in tensors_of(tree_of(part, data)) if name not in known]
        except IntegrityError as error:
            yield "", error.message
            continue
        if missing:
            yield missing[0], f"part `{part.name}` names a tensor that is not there"
