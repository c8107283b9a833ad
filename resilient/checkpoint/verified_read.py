"""Verified reads: read, verify, retry once, and report damage.

A bit flip during a transfer does not damage the stored object. TCP's checksum misses some flips,
and most S3 clients check no digest of the data they read. A flip must not make a resume skip the
checkpoint. The reader therefore digests the received bytes, and reads again if the digest does not
match.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.digest import digest_bytes
from resilient.storage.transfer import read_into

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from resilient.format.manifest import FileEntry, Manifest
    from resilient.storage.store import Store
    from resilient.storage.transfer import Arrived, ScatterBuffer

Result = TypeVar("Result")


def fetch(store: Store, key: str, verify: Callable[[bytes], Result], size_bytes_max: int) -> Result:
    """Read an object of bounded size and return the result of ``verify``.

    Crash: reads only.

    Args:
        store: Store of the object.
        key: Key of the object.
        verify: Function from the bytes to a value; raises IntegrityError.
        size_bytes_max: Largest number of bytes to read into memory.

    Raises:
        IntegrityError: Verification failed twice, or the object is larger than any valid one.
        KeyNotFound: No object has this key.
        StoreError: The store failed.
    """
    size_bytes = store.stat(key).size_bytes
    if size_bytes > size_bytes_max:
        raise IntegrityError(
            f"`{key}` has {size_bytes} bytes, more than the limit of {size_bytes_max}; it was not "
            "read",
            key=key,
        )
    try:
        return verify(store.get(key))
    except IntegrityError:
        # Read again outside of this block: inside, the error keeps the first bytes in memory.
        pass
    return verify(store.get(key))


def fetch_into(store: Store, key: str, start: int, buffer: ScatterBuffer, verify: Arrived) -> int:
    """Fill ``buffer`` with bytes of an object that ``verify`` accepts; return the number of bytes.

    Crash: reads only.

    Args:
        store: Store of the object.
        key: Key of the object.
        start: Offset in the object, bytes.
        buffer: Memory that no other code reads before this function returns.
        verify: Callback for each arrived piece; raises IntegrityError.

    Raises:
        IntegrityError: Verification failed twice.
        KeyNotFound: No object has this key.
        StoreError: The store failed.
    """
    try:
        return read_into(store, key, start, buffer, verify)
    except IntegrityError:
        return read_into(store, key, start, buffer, verify)


_NAMED_MAX = 4


def damaged(manifest: Manifest, entry: FileEntry, where: str, names: list[str]) -> IntegrityError:
    """Return the error for a damaged file.

    Args:
        manifest: Manifest that lists the file.
        entry: Entry of the file.
        where: Text with the wrong length of the file, or with the damaged byte range.
        names: Names of the affected tensors.
    """
    key, tensors = manifest.key(entry.name), join_names(names)
    return IntegrityError(
        f"`{key}`: content is not what was committed "
        f"({where}{'; in ' + tensors if tensors else ''})",
        key=key,
        tensor=tensors,
    )


@contextmanager
def missing_is_damage(store: Store, manifest: Manifest, key: str) -> Iterator[None]:
    """Inside the block, turn a missing file into IntegrityError if its manifest still exists.

    Garbage collection deletes the manifest first. A file that is missing together with its manifest
    is therefore no damage.

    Crash: reads only.
    """
    try:
        yield
    except KeyNotFound as error:
        store.stat(manifest.checkpoint.manifest_key)
        raise IntegrityError(f"`{key}` is missing", key=key) from error


def tensors_hit(manifest: Manifest, file: str, data: bytes) -> list[str]:
    """Return the names of tensors whose bytes in ``file`` differ from the committed ones.

    Crash: reads only.
    """
    return [
        tensor.name
        for tensor in manifest.tensors
        for region in tensor.regions
        if region.file == file
        and digest_bytes(memoryview(data)[region.start : region.start + region.size_bytes])
        != region.digest
    ]


def join_names(names: Sequence[str]) -> str:
    """Return the first few names, comma separated, and the number of the others."""
    unnamed_count = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (
        f" and {unnamed_count} more" if unnamed_count > 0 else ""
    )
