"""Read, verify, retry once, report damage.

From a key to proved bytes: what does not fit is asked for once more before it is damage.

A bit that flips on the way is not a bit that flipped at rest. TCP's checksum misses some, most
clients of S3 check no digest of what they read, and the stored object is whole; calling that
damage would cost a checkpoint. So the reader's own digest decides, and a mismatch is read again.

What is said of content that is not what was committed.
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


def fetch(store: Store, key: str, prove: Callable[[bytes], Result], size_bytes_max: int) -> Result:
    """Return what ``prove`` makes of an object, once its size was found to be within bounds.

    Crash: reads only.

    Args:
        store: where it is.
        key: its key.
        prove: returns a value, or raises IntegrityError.
        size_bytes_max: what may be read into memory.

    Raises:
        IntegrityError: it does not fit, twice, or is larger than anything that would.
        KeyNotFound: no such object.
        StoreError: the store failed.
    """
    size_bytes = store.stat(key).size_bytes
    if size_bytes > size_bytes_max:
        raise IntegrityError(
            f"`{key}` has {size_bytes} bytes where at most {size_bytes_max} can be right; it was "
            "not read",
            key=key,
        )
    try:
        return prove(store.get(key))
    except IntegrityError:
        # Left before the second reading: the error's frames hold the bytes of the first.
        pass
    return prove(store.get(key))


def fetch_into(store: Store, key: str, start: int, room: ScatterBuffer, prove: Arrived) -> int:
    """Fill ``room`` with bytes of an object that ``prove`` accepts, and return how many came.

    Crash: reads only.

    Args:
        store: where it is.
        key: its key.
        start: offset in it, bytes.
        room: memory that nobody looks at before this has returned.
        prove: told of each piece that came; raises IntegrityError.

    Raises:
        IntegrityError: they do not fit, twice.
        KeyNotFound: no such object.
        StoreError: the store failed.
    """
    try:
        return read_into(store, key, start, room, prove)
    except IntegrityError:
        return read_into(store, key, start, room, prove)


_NAMED_MAX = 4


def damaged(manifest: Manifest, entry: FileEntry, where: str, names: list[str]) -> IntegrityError:
    """Return the error for a file whose bytes are not what they were.

    Args:
        manifest: of its checkpoint.
        entry: the file.
        where: how long it is, or which bytes of it.
        names: the tensors hit.
    """
    key, hit = manifest.key(entry.name), join_names(names)
    return IntegrityError(
        f"`{key}`: content is not what was committed ({where}{'; in ' + hit if hit else ''})",
        key=key,
        tensor=hit,
    )


@contextmanager
def missing_is_damage(store: Store, manifest: Manifest, key: str) -> Iterator[None]:
    """Inside, a file that is not there raises IntegrityError, unless its manifest is gone too.

    Rotation deletes the manifest first: gone with it is no damage.

    Crash: reads only.
    """
    try:
        yield
    except KeyNotFound as error:
        store.stat(manifest.checkpoint.manifest_key)
        raise IntegrityError(f"`{key}` is missing", key=key) from error


def tensors_hit(manifest: Manifest, file: str, data: bytes) -> list[str]:
    """Return the names of tensors whose bytes in ``file`` are not what was committed.

    Crash: reads only.
    """
    return [
        tensor.name
        for tensor in manifest.tensors
        for one in tensor.regions
        if one.file == file
        and digest_bytes(memoryview(data)[one.start : one.start + one.size_bytes]) != one.digest
    ]


def join_names(names: Sequence[str]) -> str:
    """Return the first few names, comma separated, and how many more there are."""
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
