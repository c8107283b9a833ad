"""A damaged file gives way to a whole one, and is kept under another name beside it.

What a repair replaces was proved to be damaged, but only a person can say that nothing in it was
of worth. It is copied first and then replaced by one atomic put, so the key is never without an
object, on a disk and on an object store alike. The copy means nothing to any reader, and goes with
its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound
from resilient.format.digest import digest_bytes
from resilient.format.names import aside_name

if TYPE_CHECKING:
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store


def put_whole(store: Store, checkpoint: CheckpointId, key: str, data: bytes) -> str:
    """Put a whole file in the place of a damaged one, of which a copy stays in the folder.

    Crash: the damaged one is there, perhaps with a copy beside it, or the whole one and the copy.
    The name of the copy says what is in it, so the same again makes no second one.

    Args:
        store: the repository.
        checkpoint: in whose folder the copy is kept.
        key: of the file; it may lie in the folder of an older checkpoint.
        data: what it should be, proved.

    Returns:
        The key of the copy; empty where there was nothing to keep.

    Raises:
        StoreError: the store failed; the damaged file is as it was, or the whole one is there.
    """
    try:
        damaged = store.get(key)
    except KeyNotFound:
        damaged = data
    kept = ""
    if damaged != data:
        kept = checkpoint.key(aside_name(key.rpartition("/")[2], digest_bytes(damaged)))
        store.put(kept, damaged)
    store.put(key, data)
    return kept
