"""Stores and folders that cache a listing or report the number of bytes read."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from resilient.storage.folder import DirectoryListing, Folder
    from resilient.storage.store import Data, ObjectInfo, Store

    ProgressCallback = Callable[[int, int], None]


class CachedListingStore:
    """Store that answers ``stat`` from one listing.

    A key that is not in the listing is looked up in the store, so newer objects are found. A key
    that was deleted after the listing still looks present.

    Args:
        inner: Wrapped store.
        prefixes: Prefixes to list.
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
        """Return a range of the object."""
        return self._inner.get_range(key, start, length)

    def list(self, prefix: str = "") -> Iterable[ObjectInfo]:
        """List the wrapped store again."""
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        """Delete the object."""
        self._entries.pop(key, None)
        self._inner.delete(key)

    def stat(self, key: str) -> ObjectInfo:
        """Return the entry of the object, from the listing if it is there."""
        return self._entries.get(key) or self._inner.stat(key)


class CountingStore(CachedListingStore):
    """Store that reports the bytes read so far; any thread may read.

    Args:
        inner: Wrapped store.
        progress: Callback with the total after each read; its exceptions end the read.
    """

    def __init__(self, inner: Store, progress: Callable[[int], None]) -> None:
        super().__init__(inner)
        self._progress = progress
        self._lock = threading.Lock()
        self._read_bytes = 0

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._count(super().get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a range of the object."""
        return self._count(super().get_range(key, start, length))

    def _count(self, data: bytes) -> bytes:
        with self._lock:
            self._read_bytes += len(data)
            read_bytes = self._read_bytes
        self._progress(read_bytes)
        return data


class ProgressStore(CachedListingStore):
    """Store that reports the progress of its reader.

    Args:
        inner: Wrapped store.
        progress: Callback with the bytes read and the bytes expected.
        of_bytes: Bytes expected; if more are read, the callback gets the larger number.
    """

    def __init__(self, inner: Store, progress: ProgressCallback, of_bytes: int) -> None:
        super().__init__(inner)
        self._progress, self._total_bytes, self._read_bytes = progress, of_bytes, 0

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        return self._report(super().get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a range of the object."""
        return self._report(super().get_range(key, start, length))

    def _report(self, data: bytes) -> bytes:
        self._read_bytes += len(data)
        self._progress(self._read_bytes, max(self._read_bytes, self._total_bytes))
        return data


class ProgressFolder:
    """Folder that reports the progress of its reader.

    Args:
        inner: Wrapped folder.
        progress: Callback with the bytes read and the bytes of the folder.
        of_bytes: Bytes of the folder, if :meth:`list` is not called.
    """

    def __init__(self, inner: Folder, progress: ProgressCallback, of_bytes: int = 0) -> None:
        self.url = inner.url
        self._inner, self._progress, self._total_bytes = inner, progress, of_bytes
        self._read_bytes = 0
        self._spans: dict[str, list[tuple[int, int]]] = {}

    @property
    def seen_bytes(self) -> int:
        """Bytes that were read, each counted once."""
        return sum(end - start for spans in self._spans.values() for start, end in spans)

    def list(self) -> DirectoryListing:
        """List the folder again, and expect the bytes of all its files."""
        listing = self._inner.list()
        self._total_bytes = sum(listing.sizes.values())
        return listing

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes of a file from ``start``; fewer only at its end."""
        data = self._inner.read(name, start, length)
        self._read_bytes += len(data)
        self._progress(self._read_bytes, max(self._read_bytes, self._total_bytes))
        self._spans[name] = _merge_span(self._spans.get(name, []), start, start + len(data))
        return data


def _merge_span(spans: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the spans with a new span, which is merged with the spans that touch it."""
    separate_spans = [span for span in spans if span[1] < start or span[0] > end]
    touching_spans = [span for span in spans if span[1] >= start and span[0] <= end]
    touching_spans.append((start, end))
    return [
        *separate_spans,
        (min(span[0] for span in touching_spans), max(span[1] for span in touching_spans)),
    ]
