"""Bounded readers for JSON files and the headers of safetensors."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.format.document import check_depth
from resilient.format.regions import whole as all_of
from resilient.layouts.model import ITEM_BITS, MODEL, Piece, Tensor, Unreadable
from resilient.layouts.pickle_names import shape_of

if TYPE_CHECKING:
    from resilient.storage.folder import DirectoryListing, Folder

JSON_BYTES_MAX = 32 << 20
HEADER_BYTES_MAX = 32 << 20
"""Largest header. The library accepts 100 MB, and a header of 100,000 tensors has 12 MB."""
_META = "__metadata__"
_POINTER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer: docs/spec.md of Git LFS."""
POINTER = "it is a pointer of Git LFS, not the file: run `git lfs pull` there"
_POINTER_BYTES_MAX = 1024
_SAFE_DTYPES = frozenset(ITEM_BITS) - {"C32", "C128"}
"""Dtypes of safetensors 0.8; the library refuses a file with any other dtype."""
_NUMBER_MAX = 1 << 62
_DECIMAL_MAX = 1e300  # a large run's count of operations exceeds any step count


def read_json(folder: Folder, listing: DirectoryListing, name: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        Unreadable: The file is missing, too large or too deep, or is no JSON object.
        StoreError: The file could not be read.
    """
    if name not in listing.sizes:
        raise Unreadable(listing.why_unread(name))
    if listing.sizes[name] > JSON_BYTES_MAX:
        raise Unreadable(f"a document of {listing.sizes[name]} bytes")
    require_no_pointer(folder, name)
    return _parsed(folder.read(name, 0, JSON_BYTES_MAX), "it")


def require_no_pointer(folder: Folder, name: str) -> None:
    """Raise if a file is a Git LFS pointer, which replaces a file until the file is fetched.

    Raises:
        Unreadable: The file is a pointer.
        StoreError: The file could not be read.
    """
    if folder.read(name, 0, len(_POINTER)) == _POINTER:
        raise Unreadable(POINTER)


def pointers_in(folder: Folder, listing: DirectoryListing) -> list[str]:
    """Return the files that Git LFS has not fetched; reads only files of a pointer's size.

    Raises:
        StoreError: The folder could not be read.
    """
    return [
        name
        for name, size_bytes in sorted(listing.sizes.items())
        if len(_POINTER) <= size_bytes <= _POINTER_BYTES_MAX
        and folder.read(name, 0, len(_POINTER)) == _POINTER
    ]


def read_text(folder: Folder, listing: DirectoryListing, name: str) -> str:
    """Return the first line of a small text file; empty for a missing file or a Git LFS pointer."""
    if name not in listing.sizes:
        return ""
    data = folder.read(name, 0, 256)
    if data.startswith(_POINTER):
        return ""
    return data.decode("utf-8", "replace").partition("\n")[0].strip()


def whole(value: Any) -> int | None:
    """Return a value that is a valid count, such as steps; None for any other value."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _NUMBER_MAX:
        value = int(value)
    return value if type(value) is int and 0 <= value < _NUMBER_MAX else None


def decimal(value: Any) -> float | None:
    """Return a number as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _DECIMAL_MAX else None


def _parsed(data: bytes, problem_text: str) -> dict[str, Any]:
    if not data.strip():
        raise Unreadable(f"{problem_text} is empty")
    try:
        # Decode explicitly: ``json`` would detect an encoding, but the tools accept only UTF-8
        # without a BOM.
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_no_doubles)
        check_depth(value)
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is not text
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{problem_text} is not complete JSON ({str(error)[:120]})") from error
    if not isinstance(value, dict):
        raise Unreadable(f"{problem_text} is not a JSON object")
    return value


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name appears twice in it")
    return fields


def read_header(
    folder: Folder, listing: DirectoryListing, name: str, part: str = MODEL
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the tensors of a safetensors file and its metadata, without reading tensor data.

    Raises:
        Unreadable: The file is missing or cut, its header contradicts itself, or two tensors
            overlap.
        StoreError: The file could not be read.
    """
    if name not in listing.sizes:
        raise Unreadable(listing.why_unread(name))
    size_bytes = listing.sizes[name]
    head = folder.read(name, 0, len(_POINTER))
    if len(head) < 8:  # noqa: PLR2004 - the length field
        raise Unreadable(f"it has {size_bytes} bytes")
    if head == _POINTER:
        raise Unreadable(POINTER)
    (length,) = struct.unpack_from("<Q", head)
    if length > min(HEADER_BYTES_MAX, size_bytes - 8):
        raise Unreadable(f"its header claims {length} bytes, but the file has {size_bytes}")
    entries = _parsed(folder.read(name, 8, length), "its header")
    meta = _metadata(entries.pop(_META, None))
    tensors, ends = [], []
    for key, entry in entries.items():
        tensor, begin, end = _entry(key, entry, part, name)
        piece = Piece(all_of(tensor.shape), name, 8 + length + begin, end - begin)
        tensors.append(replace(tensor, pieces=(piece,)))
        ends.append((begin, end))
    _check_tiling(ends, size_bytes - 8 - length)
    return tuple(tensors), meta


def _metadata(metadata: Any) -> dict[str, Any]:
    """Return the metadata of a header.

    Raises:
        Unreadable: safetensors refuses the metadata, which must map texts to texts.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise Unreadable(f"its `{_META}` does not map texts to texts, and safetensors rejects that")
    return metadata


def _entry(key: str, entry: Any, part: str, file: str) -> tuple[Tensor, int, int]:
    if not isinstance(entry, dict):
        raise Unreadable(f"its header has no tensor at `{key[:80]}`")
    dtype, offsets = entry.get("dtype"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(offsets, list) or len(offsets) != 2:  # noqa: PLR2004
        raise Unreadable(f"its header has no tensor at `{key[:80]}`")
    if dtype not in _SAFE_DTYPES:
        raise Unreadable(
            f"its header gives `{key[:80]}` the dtype `{dtype[:20]}`, which safetensors rejects"
        )
    tensor = Tensor(key, part, dtype, shape_of(entry.get("shape")), (file,))
    begin, end = (whole(offset) if type(offset) is int else None for offset in offsets)
    is_cut = tensor.elements * ITEM_BITS[dtype] % 8 != 0
    if begin is None or end is None or is_cut or end - begin != tensor.size_bytes:
        raise Unreadable(f"its header gives `{key[:80]}` bytes that do not fit its shape")
    return tensor, begin, end


def _check_tiling(ends: list[tuple[int, int]], size_bytes: int) -> None:
    at = 0
    for begin, end in sorted(ends):
        if begin != at:
            raise Unreadable("its tensors overlap" if begin < at else "its tensors leave a hole")
        at = end
    if at != size_bytes:
        raise Unreadable(f"its tensors need {at} bytes, but it has {size_bytes}")
