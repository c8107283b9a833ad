"""Read a checkpoint from the memory that staged it, while that is whole; else from the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from resilient.format.digest import digest_file
from resilient.storage.shared import map_file
from resilient.storage.store import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from resilient.storage.store import Data, Store
    from resilient.vault.handover import Held


class RecallingStore:
    """A Store whose ``get`` takes files from shared memory if they still are what was stored.

    What exists is asked of the store alone: manifests and generation records are never taken
    from memory, so memory can speed a resume up and never change what is resumed. Bytes that
    are not what they were are read from the store instead.

    Args:
        store: the repository.
        held: files in shared memory, by key.
        doubt: told the key of a file whose memory is not what it was.
    """

    def __init__(
        self, store: Store, held: Mapping[str, Held], doubt: Callable[[str], None]
    ) -> None:
        self._store = store
        self._held = held
        self._doubt = doubt
        self.url = store.url
        self.exclusive = store.exclusive
        self.recalled_bytes = 0

    def get(self, key: str) -> bytes:
        """Return the whole object, from memory if that is whole."""
        held = self._held.get(key)
        data = _recall(held) if held else None
        if data is not None:
            self.recalled_bytes += len(data)
            return data
        if held:
            self._doubt(key)
        return self._store.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return a part of an object, from the store."""
        return self._store.get_range(key, start, length)

    def put(self, key: str, data: Data) -> None:
        """Store ``data``."""
        self._store.put(key, data)

    def put_new(self, key: str, data: Data) -> None:
        """Store ``data`` if the key is free."""
        self._store.put_new(key, data)

    def list(self, prefix: str = "") -> Iterable[Entry]:
        """Return what the store holds."""
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        """Remove an object from the store."""
        self._store.delete(key)

    def stat(self, key: str) -> Entry:
        """Return what the store knows of an object, or of a held file its length."""
        held = self._held.get(key)
        return Entry(key, held.proof.size_bytes) if held else self._store.stat(key)


def _recall(held: Held) -> bytes | None:
    """Return a copy of the shared bytes, or None if they are gone or not what was stored."""
    try:
        data = bytes(map_file(Path(held.path), held.proof.size_bytes, writable=False))
    except (OSError, ValueError):
        return None
    return data if digest_file(data) == held.proof else None
