"""From a key to proved bytes: what does not fit is asked for once more before it is damage.

A bit that flips on the way is not a bit that flipped at rest. TCP's checksum misses some, most
clients of S3 check no digest of what they read, and the stored object is whole; calling that
damage would cost a checkpoint. So the reader's own digest decides, and a mismatch is read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from resilient.errors import IntegrityError
from resilient.storage.filling import fill

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.storage.buffers import Room
    from resilient.storage.filling import Arrived
    from resilient.storage.store import Store

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


def fetch_into(store: Store, key: str, start: int, room: Room, prove: Arrived) -> int:
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
        return fill(store, key, start, room, prove)
    except IntegrityError:
        return fill(store, key, start, room, prove)
