"""Put of a checkpoint file: exclusive create, or overwrite after a check of the newest attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import KeyExists, KeyNotFound, NotExclusive
from resilient.format.keys import parse_checkpoint, parse_segment
from resilient.storage.transfer import as_byte_view
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.storage.store import Data, Store

EXCLUSIVE_BYTES_MAX = 8 << 20
"""An object store creates a larger object exclusively only in one slow request."""

_PIECE_BYTES = 8 << 20


def put_fenced(store: Store, key: str, data: Data, fence: Callable[[], None]) -> None:
    """Store a file of a checkpoint that this process is about to commit.

    The file is created exclusively where the store can do so. An existing file is replaced only
    directly after a check of the fence, and never if its checkpoint is committed. So a process of
    an older claim with the same number changes no committed file.

    Crash: The key has the whole old object or the whole new object.

    Args:
        store: Repository, or the near tier of this host.
        key: Key of a file in a checkpoint's folder, or of a ledger segment.
        data: Content of the file.
        fence: Callback that raises ``Fenced`` if another claim replaced this process's claim.

    Raises:
        Fenced: Another claim replaced this claim; nothing was changed.
        KeyExists: The checkpoint is committed with another content; nothing was changed.
        StoreError: The store failed.
    """
    view = as_byte_view(data, key)
    if _creates_exclusively(store, len(view)):
        try:
            store.put_new(key, view)
        except (KeyExists, NotExclusive):
            pass
        else:
            return
    is_committed = _is_committed(store, key)
    fence()
    if not is_committed:
        store.put(key, view)
    elif not _holds(store, key, view):
        raise KeyExists(f"`{key}` belongs to a committed checkpoint", key=key)


def _creates_exclusively(store: Store, size_bytes: int) -> bool:
    is_cheap = size_bytes <= EXCLUSIVE_BYTES_MAX or protocol_of(store.url) == "file"
    return store.exclusive and is_cheap


def _is_committed(store: Store, key: str) -> bool:
    checkpoint = parse_checkpoint(key.partition("/")[0]) or parse_segment(key)
    if checkpoint is None:
        return False
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def _holds(store: Store, key: str, view: memoryview) -> bool:
    """Compare an object with bytes, piece by piece."""
    try:
        if store.stat(key).size_bytes != len(view):
            return False
        starts = range(0, len(view), _PIECE_BYTES)
        pieces = ((at, view[at : at + _PIECE_BYTES]) for at in starts)
        return all(store.get_range(key, at, len(piece)) == piece for at, piece in pieces)
    except KeyNotFound:
        return False
