"""Digests of content that a comparison reads only as a whole: values, storages and files.

The digest of a value uses a canonical form, which does not depend on the order of dicts and sets.
The digest of a call in a pickle covers the name of the function and its arguments. No function is
called. Plain values in documents of this library's own format (docs/format.md) are read without
torch.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.layouts.model import StorageFormat, Unreadable
from resilient.layouts.pickle_reader import (
    PickledCall,
    PickledGlobal,
    StorageRef,
    TensorRef,
    Unordered,
)
from resilient.layouts.torch_zip import data_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from resilient.layouts.torch_zip import Archive
    from resilient.storage.folder import DirectoryListing, Folder

_BLOCK_BYTES = 4 << 20
_DEPTH_MAX = 128
_VALUES_MAX = 1_000_000
_READ_TIMES_MAX = 4
"""Maximum number of reads of a file, because members of a hostile zip may overlap."""
_SETS = {f"{home}.{kind}" for home in ("builtins", "__builtin__") for kind in ("set", "frozenset")}


class Digests:
    """Digests of the files of one checkpoint and of their content; reads each storage once.

    Args:
        folder: Folder of the files.
        listing: Sizes of the files.
    """

    def __init__(self, folder: Folder, listing: DirectoryListing) -> None:
        self._folder, self._listing = folder, listing
        self._cache: dict[tuple[str, int, int], bytes] = {}
        self._read: dict[str, int] = {}

    def of_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """Return the digest of a range of a file.

        Raises:
            Unreadable: The file was read too often, or ends too early.
            StoreError: The file could not be read.
        """
        key = (name, start, size_bytes)
        if key in self._cache:
            return self._cache[key]
        self._read[name] = self._read.get(name, 0) + size_bytes
        if self._read[name] > _READ_TIMES_MAX * self._listing.sizes.get(name, 0):
            raise Unreadable(f"`{name}` has overlapping storages")
        hasher = hashlib.blake2b(digest_size=20)
        for at in range(start, start + size_bytes, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, start + size_bytes - at)
            data = self._folder.read(name, at, length)
            if len(data) != length:
                raise Unreadable(f"`{name}` ends too early")
            hasher.update(data)
        self._cache[key] = hasher.digest()
        return self._cache[key]

    def of_file(self, name: str) -> bytes:
        """Return the digest of a whole file; for errors see :meth:`of_range`."""
        return self.of_range(name, 0, self._listing.sizes[name])

    def of_value(self, value: Any, archive: Archive | None = None) -> bytes:
        """Return the digest of a value of a pickle, with the bytes of its tensors.

        Raises:
            Unreadable: The value is deeper or larger than any state, or its bytes are missing.
            StoreError: The bytes could not be read.
        """
        return _Walk(self, self._folder, archive).of(value, 0)


class _Walk:
    """Digest of one value; shared objects of the pickle are digested once."""

    def __init__(self, digests: Digests, folder: Folder, archive: Archive | None) -> None:
        self._digests, self._folder, self._archive = digests, folder, archive
        self._digest_by_id: dict[int, bytes] = {}
        self._values_left = _VALUES_MAX

    def of(self, value: Any, depth: int) -> bytes:
        self._values_left -= 1
        if self._values_left < 0:
            raise Unreadable(f"more than {_VALUES_MAX} values")
        if depth > _DEPTH_MAX:
            raise Unreadable(f"more than {_DEPTH_MAX} levels of nested values")
        if isinstance(value, dict | list | tuple | PickledCall):
            if id(value) not in self._digest_by_id:
                self._digest_by_id[id(value)] = self._digest_sequence(value, depth + 1)
            return self._digest_by_id[id(value)]
        if isinstance(value, TensorRef):
            described = repr((value.dtype, value.shape, value.offset, value.strides)).encode()
            return _hashed("tensor", described, self._digest_storage(value.storage))
        if isinstance(value, StorageRef):
            return self._digest_storage(value)
        return _hashed(type(value).__name__, _plain(value))

    def _digest_sequence(self, value: Any, depth: int) -> bytes:
        if isinstance(value, dict):
            pairs = value.items()
            digests = sorted(self.of(key, depth) + self.of(item, depth) for key, item in pairs)
            return _hashed("dict", *digests)
        if isinstance(value, PickledCall):
            if _is_set(value):
                return self._digest_sequence(Unordered(value.args[0]), depth)
            parts = (value.name, value.args, value.state, value.items)
            return _hashed("made", *(self.of(part, depth) for part in parts))
        digests = [self.of(item, depth) for item in value]
        if isinstance(value, Unordered):
            return _hashed("set", *sorted(digests))
        return _hashed(type(value).__name__, *digests)

    def _digest_storage(self, stored: StorageRef | None) -> bytes:
        """Return the digest of the bytes of a storage; without bytes, a constant digest."""
        archive = self._archive
        if stored is None or archive is None:
            return _hashed("nothing")
        place = archive.members.get(f"data/{stored.key}")
        if place is None:
            raise Unreadable(f"`{archive.name}` lacks the bytes of a tensor")
        start = archive.base + place[0]
        if archive.form is StorageFormat.MEMBER:
            start = data_start(self._folder, archive.name, start)
        return self._digests.of_range(archive.name, start, place[1])


def _is_set(call: PickledCall) -> bool:
    args = call.args
    is_one = call.kind in _SETS and call.state is None and not call.items
    return is_one and isinstance(args, tuple) and len(args) == 1 and isinstance(args[0], list)


def _plain(value: Any) -> bytes:
    """Return a plain value as bytes, for integers of any length."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, PickledGlobal):
        return value.dotted.encode("utf-8", "surrogatepass")
    return hex(value).encode() if type(value) is int else repr(value).encode()


def _hashed(kind: str, *parts: bytes) -> bytes:
    hasher = hashlib.blake2b(kind.encode(), digest_size=20)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little") + part)
    return hasher.digest()


DEPTH_MAX = 64
_LISTS = {"$tuple", "$set", "$frozenset", "$size"}
_PAIRS = {"$dict", "$odict", "$counter"}
_ARRAYS = {"$numpy", "$array"}


@dataclass(frozen=True, slots=True)
class TensorPlaceholder:
    """A tensor that a document refers to."""

    name: str


_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$tensor": lambda raw: TensorPlaceholder(str(raw)),
    "$float": float,
    "$bytes": base64.b64decode,
}


def value_of(tree: Any, depth: int = 0) -> Any:
    """Return the value of a tree, with :class:`TensorPlaceholder` for tensors and texts for keys.

    Raises:
        ValueError: The tree is deeper than any state.
    """
    if depth > DEPTH_MAX:
        raise ValueError(f"more than {DEPTH_MAX} levels of nested values")
    if isinstance(tree, list):
        return [value_of(item, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree)) if len(tree) == 1 else ""
    if not tag.startswith("$"):
        return {key: value_of(value, depth + 1) for key, value in tree.items()}
    return _tagged(tag, tree[tag], depth)


def _tagged(tag: str, raw: Any, depth: int) -> Any:
    if tag in _LISTS and isinstance(raw, list):
        return [value_of(item, depth + 1) for item in raw]
    if tag in _PAIRS and isinstance(raw, list):
        pairs = [pair for pair in raw if isinstance(pair, list) and len(pair) == 2]  # noqa: PLR2004
        return {str(value_of(key, depth + 1)): value_of(item, depth + 1) for key, item in pairs}
    if tag in _ARRAYS and isinstance(raw, list) and raw:
        return value_of(raw[-1], depth + 1)
    leaf = _LEAVES.get(tag)
    return leaf(raw) if leaf else raw


def plain_leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield plain values with their paths, without tensors; a list of plain values is one value."""
    if depth > DEPTH_MAX:
        return
    if isinstance(value, list | tuple) and not any(map(_is_more, value)):
        yield path, list(value)
    elif isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from plain_leaves(item, f"{path}.{key}" if path else str(key), depth + 1)
    elif not isinstance(value, TensorPlaceholder):
        yield path, value


def _is_more(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | TensorPlaceholder)
