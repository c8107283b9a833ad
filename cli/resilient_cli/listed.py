"""Stores for reading: one answers ``stat`` from listings, one tells how much was read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resilient.storage.store import Data, Entry, Store


class ListedStore:
    """Another store, listed once.

    A key that the listing does not have is asked of the store, so what was written since then
    is found. A key that was deleted since then still looks present.

    Args:
        inner: the store itself.
        prefixes: what to list.
    """

    def __init__(self, inner: Store, *prefixes: str) -> None:
        self._inner = inner
        self._entries = {entry.key: entry for prefix in prefixes for entry in inner.list(prefix)}
        self.url = inner.url
        self.exclusive = inner.exclusive

    def put(self, key: str, data: Data) -> None:
        """Store an object."""
        self._entries.pop(key, None)
        self._inner.put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Store an object if its key is free."""
        self._entries.pop(key, None)
        self._inner.put_new(key, data)

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a piece of the object."""
        return self._inner.get_range(key, start, length)

    def list(self, prefix: str = "") -> Iterable[Entry]:
        """List anew."""
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        """Remove the object."""
        self._entries.pop(key, None)
        self._inner.delete(key)

    def stat(self, key: str) -> Entry:
        """Return the object's entry, from the listing if it was there."""
        return self._entries.get(key) or self._inner.stat(key)


class HeardStore(ListedStore):
    """Another store, which tells how many bytes were read of it so far; of any thread.

    Args:
        inner: the store itself.
        told: called after each read; what it raises ends the reading.
    """

    def __init__(self, inner: Store, told: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._told = told
        self._lock = threading.Lock()
        self._read_bytes = 0

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._heard(super().get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a piece of the object."""
        return self._heard(super().get_range(key, start, length))

    def _heard(self, data: bytes) -> bytes:
        with self._lock:
            self._read_bytes += len(data)
            done = self._read_bytes
        self._told(done)
        return data
